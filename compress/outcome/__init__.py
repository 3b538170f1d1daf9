"""The outcome of a run for those who were not there: its JSON document as a request to a webhook, and as
metrics.
"""
