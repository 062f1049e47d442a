"""Optuna's search with sixteen trials at a time, in one program: `python examples/optuna_sweep.py`."""

import podracer


def main(rounds=4, trials=16, **settings):
    try:
        import optuna
    except ImportError:
        raise SystemExit("this example needs Optuna: pip install optuna") from None

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(constant_liar=True))
    for seed in range(rounds):
        asked = [study.ask() for _ in range(trials)]
        rates = [trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True) for trial in asked]
        costs = [trial.suggest_float("entropy_cost", 1e-4, 1e-1, log=True) for trial in asked]
        hyper = {"learning_rate": rates, "entropy_cost": costs}
        result = podracer.train("vtrace", "catch", seed=1000 * seed, hyper=hyper, progress=False, **settings)
        for trial, member in zip(asked, result.summary["members"]):
            failed = optuna.trial.TrialState.FAIL if member["diverged"] else None
            study.tell(trial, None if failed else member["eval_return_mean"], state=failed)
        print(f"{len(study.trials)} trials: best return {study.best_value:.3f} with {study.best_params}")
    return study


if __name__ == "__main__":
    main(total_steps=100_000)
