"""How training touches storage, measured phase by phase."""
