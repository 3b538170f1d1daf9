"""The doors for what somebody else made: JSON (`parse.py`), files (`files.py`), and text that is printed
(`text.py`).

Every checkpoint, registry, cache entry and data file goes through them, and a test forbids other ways in.
"""
