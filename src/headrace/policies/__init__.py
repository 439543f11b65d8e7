"""Networks that act in environments: what an actor runs and what the trainer changes.

config.py          [policy]
spaces.py          Gymnasium spaces -> plain descriptions that travel; observations -> named leaves
networks.py        a description -> the network: encoder, recurrent core, policy and value heads, running normaliser
q_networks.py      the same for off-policy learning: values of actions, squashed actor, twin critics
distributions.py   the policy head's numbers -> actions, log-probabilities, entropies
"""
