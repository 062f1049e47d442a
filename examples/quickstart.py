"""Train PPO on CartPole, look at it, and load it again: `python examples/quickstart.py`."""

import podracer

result = podracer.train("ppo", "cartpole", total_steps=200_000, seed=0, run_dir="runs/quickstart")
print(result.evaluate(episodes=100))
result.plot("runs/quickstart/curve.png")
result.animate("runs/quickstart/policy.gif")

again = podracer.load("runs/quickstart")
print("the action at rest:", again.policy([0.0, 0.0, 0.0, 0.0]))
