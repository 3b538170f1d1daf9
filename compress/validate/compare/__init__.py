"""Comparison of models that were validated one by one, from their evidence alone; nothing is measured here.

evidence.py     a report read back: readings with intervals, and the conditions that they hold under
difference.py   one metric of two models: the change with its interval, or why none is stated
dominance.py    who is at least as good in everything and better in something
champion.py     gates on a candidate against the model that an alias holds now
document.py     any number of models as one JSON document
page.py         the document as a self-contained page, pictures.py its pictures
"""
