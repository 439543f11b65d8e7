"""What those who sample and those who train both run: networks that act in environments, routers of language models.

config.py          [policy]
spaces.py          Gymnasium spaces -> plain descriptions that travel; observations -> named leaves
networks.py        a description -> the network: encoder, recurrent core, policy and value heads, running normaliser
q_networks.py      the same for off-policy learning: values of actions, squashed actor, twin critics
routers.py         a mixture-of-experts model -> the experts that it chose, or shall choose
distributions.py   the policy head's numbers -> actions, log-probabilities, entropies
"""
