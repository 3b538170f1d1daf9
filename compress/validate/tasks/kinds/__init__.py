"""Kinds of tasks, one a file."""
