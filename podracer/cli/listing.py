"""`podracer envs` and `podracer agents`: what there is."""

from __future__ import annotations

import dataclasses
import sys

import envs_jax
from podracer.cli.arguments import refuse_arguments
from podracer.run.experiment import AGENTS


def envs(argv: list[str]) -> int:
    refuse_arguments("envs", argv)
    for name in envs_jax.names():
        spec = envs_jax.make(name).spec
        fields = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(envs_jax.options(name)))
        print(f"{name:<14} {spec.action_space}   options: {fields or 'none'}")
    print("envpool:TASK   every task of EnvPool, such as envpool:Pong-v5 (pip install 'podracer[sebulba]')")
    print("gymnasium:ID   every environment that Gymnasium can make, such as gymnasium:Acrobot-v1")
    return 0


def agents(argv: list[str]) -> int:
    refuse_arguments("agents", argv)
    for name, (cls, make) in AGENTS.items():
        summary = (sys.modules[make.__module__].__doc__ or "").strip().splitlines()[0]
        print(f"{name:<8} {summary}  settings: podracer train {name} catch --help ({cls.__name__})")
    return 0
