"""The tables of the results pages, one file a page; every number comes from a result file."""
