"""Generated texts of source and candidate, and the behaviour of both at long context.

texts.py        both models continue the same prompts: where they part, how much they repeat, how long
                they get
positions.py    perplexity by position in the context
needle.py       a fact in a long text, to be found again
"""
