"""Run folders: reads and writes all of their files.

schema       config.json, summary.json and metrics.jsonl, checked when read; identity of a run
folder       writes them while a run trains
status       status of the run in a folder
find         the runs below some folders, and runs that a comparison is yet to begin
comparable   conditions under which the losses of runs can be compared
variants     runs that differ only in their seed
statistics   means, standard errors and paired differences over seeds
"""
