"""What a command cannot do, beside what the packages raise."""


class CommandError(Exception):
    """A command cannot do what it was asked to do."""
