"""Bytes, time and cost of a run over a link, before you rent a machine. Nothing runs.

traffic      method, shape of the model, K -> messages, to the byte
simulate     messages, step time, link, topology -> seconds by cause, long-run utilisation, and the
             rate that a utilisation needs
forecast     job, methods -> a row for each; to_json turns them into data
advice       job -> recommended methods
calibration  folder of a run -> the same job over another link
"""
