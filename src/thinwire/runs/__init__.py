"""Run folders: the only code that knows what is in one.

schema       config.json, summary.json and metrics.jsonl, checked as they are read; which run it is
folder       writes them while a run trains
status       how far the run in a folder has come
find         the runs below some folders; which a comparison will have, and whether it is over
comparable   what runs must have in common for their losses to be compared
variants     runs that differ in nothing but their seed
statistics   means, standard errors and paired differences over seeds
"""
