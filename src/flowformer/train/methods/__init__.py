"""The methods of the paper's tables without attention, one file each; `fit.py` runs one by name and records it,
`resume.py` continues what was interrupted.

Time series (extra "ts"): XGBoost, LSTM and TCN have a file each; DTW and Rocket are aeon's classifiers.
`classifiers.py` builds all five by name. Reinforcement learning (extra "rl"): behaviour cloning, AWAC and the Decision
Transformer, which `policies.py` builds by name.
"""
