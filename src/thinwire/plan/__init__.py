"""Planning: what a link allows, worked out before you rent a machine. Nothing is run.

traffic    method, shape of the model, K -> messages, to the byte
scenario   messages, step time, link, topology -> what each exchange takes
simulate   scenario, steps -> seconds, and what they went to
required   scenario -> utilisation in the long run; the rate that a utilisation needs
forecast   job, methods -> a row for each; sweep, text, to_json and `report` show them
calibration  folder of a run -> the same job over another link
"""
