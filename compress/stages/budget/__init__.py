"""Budgets of bytes and of time: what the schemes and widths of a model cost, and the best choice that a
budget allows.

Mixed precision (`quantize`, `scheme: {kind: mixed}`) and pruning to a size or a speed (`prune`, `target`)
share this package.

spec.py         what a recipe states: budgets, and the schemes to choose from
tables.py       kernel times of devices that need not be here, from tables that ship (`latency_tables/`)
timing.py       kernel times measured on this device
times.py        either of the two, as one interface; measured times are kept for a resumed run
costs.py        bytes or time of every scheme of every linear group
sensitivity.py  predicted loss of every scheme of every linear group
allocation.py   the knapsack: least loss within a budget
choose.py       the schemes of mixed precision, from all of these
"""
