"""Bytes, time and cost of a run over a link, before you rent a machine. Nothing is run.

traffic      method, shape of the model, K -> messages, to the byte
simulate     messages, step time, link, topology -> seconds by cause, utilisation in the long run,
             and the rate that a utilisation needs
forecast     job, methods -> a row for each; to_json has them as data
advice       job -> recommended methods
calibration  folder of a run -> the same job over another link
"""
