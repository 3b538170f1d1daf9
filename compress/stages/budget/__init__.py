"""Budgets of bytes and of time: what a choice costs, and the best choice within a budget. Shared by mixed precision and pruning."""
