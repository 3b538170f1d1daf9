"""Readers for what somebody else made: files (`files.py`), JSON (`parse.py`), its fields by type and range
(`fields.py`), regular expressions (`pattern.py`), and text that is printed (`text.py`).

Every checkpoint, registry, cache entry and data file goes through them, and a test forbids other ways in.
"""
