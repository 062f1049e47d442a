"""The pictures of README and the guides: `python docs/pictures.py`, or `make pictures`; some minutes on two cores.

It trains what it shows, in `runs/pictures`, unless the runs are there.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import podracer
from podracer.evaluation import rendering

DOCS = pathlib.Path(__file__).resolve().parent
RUNS = DOCS.parent / "runs" / "pictures"
IMAGES = DOCS / "images"

LANDER = ("ppo", "envpool:LunarLander-v3", {"preset": "classic"})
PLAYER = ("alphazero", "tic_tac_toe", {"total_steps": 400_000, "env_options": {"opening_plies": 8}})

EVERY, SHOWN, SIZE, GAP, HEAD = 3, 130, (300, 200), 8, 28
"""Steps between two frames of the animation, its frames, and sizes in pixels."""

OPENING = (0, 4, 8)
"""A trap: of white's six answers, the two corners lose and the four edges draw."""


def trained(agent: str, env: str, settings: dict[str, Any]) -> podracer.Result:
    """A run with a directory of its own."""
    directory = RUNS / f"{agent}-{env.replace(':', '-')}"
    if (directory / "summary.json").exists():
        return podracer.load(directory)
    return podracer.train(agent, env, run_dir=directory, seed=0, **settings)


def landings(result: podracer.Result, params: Any) -> list[Image.Image]:
    """Episodes one after the other, as many frames as are shown; the last of each is held for a moment."""
    images: list[Image.Image] = []
    seed = 0
    while len(images) < SHOWN:
        frames = rendering.frames(result.agent, result.environment, params, seed)
        frames = np.concatenate([frames[::EVERY], np.repeat(frames[-1:], 12, axis=0)])
        images += [Image.fromarray(frame).resize(SIZE, Image.Resampling.LANCZOS) for frame in frames]
        seed += 1
    return images[:SHOWN]


def before_and_after() -> None:
    """Writes the animation of a policy before training beside the same one after it."""
    result = trained(*LANDER)
    state = result.agent.init(jax.random.key(0), {name: jnp.float32(x) for name, x in result.agent.hyper.items()})
    untrained = result.agent.actor_params(state, jnp.float32(0))
    steps = result.summary["env_steps"]
    columns = {"before training": untrained, f"after {steps / 1e6:.0f}M steps": result.actor_params()}
    font = ImageFont.truetype(matplotlib.get_data_path() + "/fonts/ttf/DejaVuSans.ttf", 15)
    width = SIZE[0] + GAP
    pictures = [Image.new("RGB", (2 * width - GAP, HEAD + SIZE[1]), "white") for _ in range(SHOWN)]
    for column, (title, params) in enumerate(columns.items()):
        for picture, frame in zip(pictures, landings(result, params), strict=True):
            picture.paste(frame, (column * width, HEAD))
            middle = (column * width + SIZE[0] / 2, HEAD / 2)
            ImageDraw.Draw(picture).text(middle, title, "#1f2937", font, anchor="mm")
    pictures = [picture.quantize(32, dither=Image.Dither.NONE) for picture in pictures]
    path = IMAGES / "before-and-after.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=60, loop=0, optimize=True)
    print(f"{path.relative_to(DOCS)}: {path.stat().st_size / 1000:.0f} kB")


def search() -> None:
    """Writes a search of AlphaZero as bars and as a tree of boards."""
    result = trained(*PLAYER)
    game = result.environment
    state = game.start()
    for move in OPENING:
        state, _ = game.step(state, jnp.int32(move), jax.random.key(0))
    explanation = result.explain(game.observe(state), simulations=50, search="puct")
    print(explanation)
    explanation.bars(IMAGES / "search-bars.png")
    explanation.tree(IMAGES / "search-tree.png")


if __name__ == "__main__":
    search()
    before_and_after()
