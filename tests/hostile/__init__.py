"""Hostile files: what another's file may make a command do, which is nothing but to refuse it or to work."""
