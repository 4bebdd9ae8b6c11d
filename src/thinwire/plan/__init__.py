"""Planning: what a link allows, worked out before you rent a machine. Nothing is run.

traffic      method, shape of the model, K -> messages, to the byte
simulate     messages, step time, link, topology -> seconds, and what they went to; the utilisation
             in the long run, and the rate that a utilisation needs
forecast     job, methods -> a row for each; text and to_json show them
advice       job -> what to run
calibration  folder of a run -> the same job over another link
"""
