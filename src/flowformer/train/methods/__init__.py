"""The methods of the paper's tables that are no attention, one file each; `fit` runs one by name and records it.

Time series, the extra "ts": DTW and Rocket, which are aeon's own (`classifiers`), XGBoost, LSTM, TCN. Reinforcement
learning, the extra "rl": behaviour cloning, AWAC, the Decision Transformer (`policies`).
"""
