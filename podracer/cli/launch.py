"""`podracer launch --processes 2 -- train ppo catch ...`: several processes of one run on this machine."""

from __future__ import annotations

from podracer.cli.arguments import InputError, parse
from podracer.system import console
from podracer.system.stopping import STOPPING


def run(argv: list[str]) -> int:
    """Runs the command in every process; returns the exit code: the first that is neither 0 nor that of a process ended
    by another one."""
    from podracer.pod.launch import Group, Launch  # which no other command has a use for

    ours, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    try:
        arguments = parse(Launch, ours, "podracer launch")
        if not command:
            raise InputError("what to run comes after --, as in: -- train ppo catch --topology pod")
        ours_to_run = not (arguments.script or arguments.module)
        if ours_to_run and command[0] in ("train", "resume") and not any(w.startswith("--topology") for w in command):
            raise InputError("the processes would each run by themselves; add --topology pod to the command")
    except (InputError, ValueError) as error:
        console.say(f"podracer launch: error: {error}")
        return 2
    for attempt in range(arguments.restarts + 1):
        again = attempt and ours_to_run and command[0] == "train" and "--resume" not in command
        code, stopped = Group(arguments, [*command, "--resume"] if again else command).run()
        if code in (0, 2) or code - 128 in STOPPING or stopped:  # done, asked for badly, or stopped in good order
            break
        if attempt < arguments.restarts:
            console.say(f"podracer launch: start {attempt + 2} of {arguments.restarts + 1}")
    return code
