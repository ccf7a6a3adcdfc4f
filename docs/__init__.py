"""The documentation, with modules that build its site, draw its pictures and run its code."""
