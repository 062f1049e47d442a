"""temporary stand-in by mctx"""
from typing import NamedTuple, Any
import dataclasses, jax, jax.numpy as jnp, mctx
class Root(NamedTuple):
    logits: Any; value: Any; embedding: Any; legal: Any
class Step(NamedTuple):
    reward: Any; discount: Any; logits: Any; value: Any; embedding: Any; legal: Any
class Model(NamedTuple):
    root: Any; step: Any
class Searched(NamedTuple):
    policy: Any; value: Any; action: Any
@dataclasses.dataclass(frozen=True)
class SearchConfig:
    algorithm: str = "puct"; simulations: int = 16; max_depth: Any = None; bounds: Any = None; epsilon: float = 1e-8
    dirichlet_alpha: Any = None; dirichlet_fraction: float = .25; considered: int = 16; value_scale: float = .1
def search(model, variables, root, key, config, *, explore=True, temperature=1.0):
    def rec(v, key, action, emb):
        s = model.step(v, emb, action)
        return mctx.RecurrentFnOutput(reward=s.reward, discount=s.discount, prior_logits=s.logits, value=s.value), s.embedding
    r = mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=root.embedding)
    inv = None if root.legal is None else ~root.legal
    if config.algorithm == "puct":
        out = mctx.muzero_policy(variables, key, r, rec, config.simulations, invalid_actions=inv, max_depth=config.max_depth,
            dirichlet_fraction=config.dirichlet_fraction if explore else 0.0, dirichlet_alpha=config.dirichlet_alpha or 0.3, temperature=1.0,
            qtransform=lambda *a, **k: mctx.qtransform_by_parent_and_siblings(*a, epsilon=config.epsilon))
        visits = out.action_weights
        best = jnp.argmax(visits, -1)
        if isinstance(temperature, float) and temperature == 0.0: action = best
        else:
            lg = jnp.log(visits) / temperature
            action = jax.random.categorical(jax.random.fold_in(key, 7), lg)
    else:
        out = mctx.gumbel_muzero_policy(variables, key, r, rec, config.simulations, invalid_actions=inv, max_depth=config.max_depth, gumbel_scale=1.0 if explore else 0.0,
          max_num_considered_actions=config.considered)
        visits, action = out.action_weights, out.action
    value = out.search_tree.node_values[:, 0]
    return Searched(visits, value, action.astype(jnp.int32))
