"""Tasks: how many items of a benchmark source and candidate answer, and whether the difference is noise.

    task.py         what every task of a recipe states, and what it gives: the scores of both models
    kinds/          one kind of task a file: a JSONL file of one's own, the tasks of lm-eval
    items.py        the items of a JSONL file
    metrics.py      the score of an answer
    text_model.py   an engine with its tokenizer: texts are scored and continued
    paired.py       statistics of scores on the same items; sequential.py those that may be looked at any time
    compare.py      one row a task: accuracies, drop with its interval, verdict

Source and candidate answer the same items, so all statistics are paired.
"""
