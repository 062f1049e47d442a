"""Sixteen learning rates at once, in one program: `python examples/population.py`."""

import numpy as np

import podracer

rates = np.logspace(-4, -1.5, 16)
result = podracer.train("vtrace", "catch", total_steps=200_000, population=16, hyper={"learning_rate": rates})
for member in result.summary["members"]:
    print(f"learning rate {member['learning_rate']:.5f}   return {member['eval_return_mean']:+.2f}")
