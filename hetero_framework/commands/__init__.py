"""The subcommands of `hetero`, in the order in which its help lists them.

Each is a module of its name, imported only when that command is given. The module has `EXAMPLES`,
which its help ends with, `OPTIONS`, and `run(arguments)`, which returns an exit code, None for 0.
It imports nothing slow at its top: help and simple errors come at once.
"""

SUMMARIES = {
    "init": "write a configuration, by questions or from options",
    "convert": "make a configuration from one of axolotl, LLaMA-Factory or TRL",
    "check": "validate configuration, model and data; show each machine's part and memory",
    "train": "train; the same command on every machine",
    "worker": "serve the layers of this machine's worker entries",
    "launch": "write what starts every process of a configuration, and start them",
    "pause": "pause a worker of this machine: its state goes to the run, its process ends",
    "resume": "start a paused worker of this machine again; its run continues by itself",
    "invite": "print the command that makes another machine a worker or an island, and wait until"
    " it has joined",
    "lighthouse": "serve as the place where islands (coordinators that train one model together)"
    " find each other; needs torchft, which islands do not",
    "join": "make this machine a worker or an island, with the line that `hetero invite` printed",
    "keys": "list, check, revoke or rotate this machine's keys; export the keys of others as files",
    "diagram": "draw the machines and the layers that each of them holds",
    "plan": "measure or estimate the machines, and choose the layers that each of them holds",
    "bench": "measure the machines and predict the step of the configured plan",
    "timeline": "show where the time of a run's steps went and what would help most; draw a step",
    "plot": "draw loss, evaluation, learning rate and gradient norm of a run, or of several",
    "chat": "talk to a run's result through the machines of its plan, or on this one",
    "generate": "continue the prompts of a file by a run's result",
    "verify": "cut a model and compare it with the whole: loss, gradients, three training steps",
    "merge": "fold an adapter into its model and write a checkpoint",
    "export": "write the adapter or model of a checkpoint, without workers",
    "doctor": "show devices, versions and what this machine can do; with --config, what would stop"
    " a run",
    "schema": "print the JSON Schema of hetero_config.json",
}
