"""The command line: one file per command, each imported only when called."""

from tonari.names import link

link()
