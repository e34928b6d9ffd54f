"""From rows of tokens to gradients: the loss of a step as independent choices.

    scores ──advantage──▶ A     log-probabilities ──ratio──▶ r     objective(r, A) ──loss mean──▶ one number
                                              corrections.py ──▶ weights of tokens ──┘

An objective is one file here with a function `token_loss` (the protocol `TokenLoss` of base.py), and its name in
`OBJECTIVES` of settings/objectives.py. Imports settings, data, ranks, model and exact.
"""
