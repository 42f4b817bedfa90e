"""ADPO as an algorithm of verl: importing `adpo.trainers.verl.plugin` registers it, in every process of a run.

A rollout's groups are spread over ranks and micro-batches as verl pleases. Before each optimizer step the actor
workers exchange one log-probability and one reward per completion, and from the table of whole groups each gets
the coefficients of its rows; the loss is then ``sum c * logp``, which may be cut in any way.
"""
