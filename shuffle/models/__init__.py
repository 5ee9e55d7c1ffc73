"""Replicas that train apart exchange their models, in place of rows; the only torch code here."""
