"""The methods of the paper's tables that are no attention, one file each; `fit` runs one by name and records it.

Time series, the extra "ts": XGBoost, LSTM and TCN; DTW and Rocket, which are aeon's own, have no file, but an entry in
`classifiers.py`, which builds all five by name. Reinforcement learning, the extra "rl": behaviour cloning, AWAC and the
Decision Transformer; `policies.py` builds them by name.
"""
