"""What can go wrong while rows travel."""


class ExchangeError(Exception):
    """Root of every error that shuffle raises for something outside the program."""
