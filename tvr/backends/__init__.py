"""Backends that ship with tvr; each is found through its entry point, like anyone else's."""
