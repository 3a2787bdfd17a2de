"""``axonn plan --check``: what an existing configuration takes, what would be better and why; and what is wrong with it, in one sentence."""

import json

import pytest

from axonn_plugins import cli

ASKED = "--model gpt-20b --machine perlmutter --gpus 256 --recompute"
BF16 = {"bf16": {"enabled": True}}


@pytest.fixture
def asked(tmp_path, capsys):
    def run(raw, options=ASKED):
        file = tmp_path / "ds_config.json"
        file.write_text(raw if isinstance(raw, str) else json.dumps(raw))
        code = cli.main(f"plan --check {file} {options}".split())
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def grid(gx=1, gy=1, gz=1, **block):
    return {"tensor_parallel": {"gx": gx, "gy": gy, "gz": gz, "plan": "auto"}, **block}


def test_a_grid_and_what_is_better_and_why(asked):
    raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, "axonn": grid(8, 1, 8), **BF16}
    code, out, _ = asked(raw)
    assert code == 0 and "gx=8 gy=1 gz=8 gdata=4, ZeRO stage 0" in out
    assert "collectives of split layers" in out and "It saves" in out and "gx 8 to" in out
    checked = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]
    assert (checked["gx"], checked["gz"], checked["gdata"], checked["m"]) == (8, 8, 4, 32) and checked["fits"]
    assert checked["better"]["seconds"] < 0.99 * checked["seconds"]
    assert sum(checked["parts"].values()) == pytest.approx(checked["seconds"])
    assert ", ZeRO's stage to 1" in out  # as which better's memory is counted


def test_what_is_checked_is_what_is_planned(asked, capsys):
    raw = {"train_batch_size": 1024, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}, "axonn": grid(2, 2, 8), **BF16}  # fmt: skip
    checked = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]
    assert cli.main(f"plan {ASKED} --batch 1024 --fix gx=2,gy=2,gz=8,gdata=8,stages=1,m=4 --json -".split()) == 0
    planned = json.loads(capsys.readouterr().out)["best"]
    assert checked["seconds"] == planned["seconds"] and checked["memory_gb"] == planned["memory_gb"]


def test_gathered_weights_that_backward_finds_take_room_and_no_second_gather(asked):
    def checked(options="--model gpt-20b --machine perlmutter --gpus 256", **keys):
        raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, "axonn": grid(8, 1, 8), **BF16}
        raw["axonn"]["tensor_parallel"] |= keys
        return json.loads(asked(raw, f"{options} --json -")[1])["checked"]

    kept, half, gone = (
        checked(**keys) for keys in ({}, {"reshard_after_forward": 0.5}, {"reshard_after_forward": True})
    )
    whole = 2 * 20.1 / 8  # gx shares of it
    held = [one["memory_parts_gb"]["weights"] for one in (kept, half, gone)]
    assert held[0] == pytest.approx(whole + whole / 8, rel=0.01) and held[1] == pytest.approx(
        whole / 2 + whole / 8, rel=0.01
    )
    assert held[2] < held[1]
    assert kept["collectives"]["gather"] == pytest.approx(gone["collectives"]["gather"] / 2)
    assert half["collectives"]["gather"] == pytest.approx(gone["collectives"]["gather"] * 3 / 4)
    assert kept["seconds"] < half["seconds"] < gone["seconds"]
    again = [checked(ASKED, **keys) for keys in ({}, {"cache_gathers": "all"})]
    assert again[0]["memory_parts_gb"]["weights"] == held[2] and again[1]["memory_parts_gb"]["weights"] == held[0]


def test_a_pipeline_that_computes_activations_again(asked):
    def checked(options, **pipeline):
        raw = {
            "train_batch_size": 1024,
            "train_micro_batch_size_per_gpu": 1,
            "axonn": grid(2, 1, 4, pipeline=pipeline),
            **BF16,
        }
        return json.loads(
            asked(raw, f"--model gpt-20b --machine perlmutter --gpus 256 --fix stages=4 {options} --json -")[1]
        )["checked"]

    said, asked_for, whole = checked("", activation_checkpointing=1), checked("--recompute"), checked("")
    assert (said["seconds"], said["memory_gb"]) == (asked_for["seconds"], asked_for["memory_gb"])
    assert said["memory_parts_gb"]["activations"] < whole["memory_parts_gb"]["activations"]


def test_ranks_that_share_sequences(asked, capsys):
    asks = "--model llama3-8b --sequence 131072 --machine h100 --gpus 64 --recompute"
    shared = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **BF16}
    raw = {**shared, "train_batch_size": 4, "axonn": grid(2, 1, {"batch": 2, "sequence": 8})}
    code, out, err = asked(raw, asks)
    assert code == 0 and "gx=2 gy=1 gz=16 gdata=2 sequence=8" in out, err
    checked = json.loads(asked(raw, f"{asks} --json -")[1])["checked"]
    sizes = "gx=2,gy=1,gz=16,gdata=2,sequence=8,stages=1,m=1"
    assert cli.main(f"plan {asks} --batch 4 --fix {sizes} --json -".split()) == 0
    planned = json.loads(capsys.readouterr().out)["best"]
    assert checked["seconds"] == planned["seconds"] and checked["memory_gb"] == planned["memory_gb"]
    better = asked({**shared, "train_batch_size": 4, "axonn": grid(1, 1, {"batch": 1, "sequence": 64})}, asks)[1]
    assert "gz.sequence 64 to" in better, better
    staged = {**shared, "train_batch_size": 4, "axonn": grid(2, 1, {"batch": 1, "sequence": 8}, pipeline={})}
    code, out, err = asked(staged, f"{asks} --fix stages=2")
    assert code == 0 and "gx=2 gy=1 gz=8 gdata=2 sequence=8 stages=2" in out, (out, err)
    code, _, err = asked({**shared, "train_batch_size": 6, "axonn": grid(2, 1, {"batch": 2, "sequence": 8})}, asks)
    assert code == 2 and "gz.batch*gdata = 2*2 = 4 ranks that read different data" in err


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stock_stages_share_out_what_they_share_out(stage, asked):
    raw = {"train_batch_size": 1024, "zero_optimization": {"stage": stage}, **BF16}
    checked = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]
    held, parameters = checked["memory_parts_gb"], 20.1
    assert (checked["gz"], checked["gdata"]) == ((256, 1) if stage == 3 else (1, 256))
    assert held["optimizer"] == pytest.approx(12 * parameters / (1 if stage == 0 else 256), rel=0.01)
    assert held["gradients"] == pytest.approx(2 * parameters / (1 if stage < 2 else 256), rel=0.01)
    assert checked["fits"] == (stage == 3) and checked["memory_gb"] == pytest.approx(sum(held.values()))
    why = " ".join(checked["why"])
    assert stage == 3 or ("It does not fit: it needs" in why and 'add "axonn": {"tensor_parallel"' in why)


def test_secondary_shares_of_a_node_leave_gradients_with_all_ranks(asked):
    raw = {"train_batch_size": 1024, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}, **BF16}
    checked = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]
    held = checked["memory_parts_gb"]
    assert (checked["gz"], checked["gdata"]) == (4, 64)
    assert held["gradients"] == pytest.approx(2 * 20.1 / 256, rel=0.01)
    assert held["optimizer"] == pytest.approx(12 * 20.1 / 256, rel=0.01)
    raw["axonn"] = grid(
        1, 1, 4, tensor_parallel={"gx": 1, "gy": 1, "gz": 4, "plan": "auto", "reshard_after_forward": True}
    )
    raw["zero_optimization"] = {"stage": 2}
    ours = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]["memory_parts_gb"]
    assert held["weights"] == pytest.approx(ours["weights"] + 2 * 20.1 / 256, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_of_experts_and_of_pruned_states(stage, asked):
    raw = {"train_batch_size": 64, "zero_optimization": {"stage": stage}, **BF16}
    held = json.loads(asked(raw, "--model mixtral-8x7b --machine h100 --gpus 32 --json -")[1])["checked"][
        "memory_parts_gb"
    ]
    experts, others = 32 * 8 * 3 * 4096 * 14336 / 1e9, 1.6  # eight data-parallel ranks have each expert
    assert held["optimizer"] == pytest.approx(
        12 * ((experts + others) / 32 if stage else experts / 8 + others), rel=0.03
    )
    assert held["gradients"] == pytest.approx(
        2 * (experts / 8 + others if stage < 2 else (experts + others) / 32), rel=0.03
    )
    raw = {
        "train_batch_size": 1024,
        "axonn": {"samo": {"sparsity": 0.9}},
        "zero_optimization": {"stage": stage},
        **BF16,
    }
    held = json.loads(asked(raw, f"{ASKED} --json -")[1])["checked"]["memory_parts_gb"]
    index = 0.1 * 2 * 20.1
    assert held["optimizer"] == pytest.approx(index + 0.1 * 12 * 20.1 / (256 if stage else 1), rel=0.01)


def test_auto_keys(asked):
    raw = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    raw |= {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}
    code, out, err = asked(raw)
    assert code == 2 and "does not say how many samples a step has; give --batch" in err
    code, out, _ = asked(raw, f"{ASKED} --batch 512")
    assert code == 0 and 'Note: train_micro_batch_size_per_gpu is "auto": the best value is taken.' in out
    assert "float32" not in out
    open_grid = {"train_batch_size": 1024, "axonn": {"tensor_parallel": {"plan": "planner", "gx": 2}}, **BF16}
    checked = json.loads(asked(open_grid, f"{ASKED} --json -")[1])["checked"]
    assert checked["gx"] == 2 and checked["gx"] * checked["gy"] * checked["gz"] * checked["gdata"] == 256


def test_systems_and_stages(asked):
    raw = {"train_batch_size": 1024, "axonn": grid(2, 1, 4, samo={"sparsity": 0.9}, pipeline={}), **BF16}
    code, _, err = asked(raw)
    assert code == 2 and "say it besides, such as --fix stages=4" in err
    checked = json.loads(asked(raw, f"{ASKED} --fix stages=4 --json -")[1])["checked"]
    assert checked["stages"] == 4 and checked["gdata"] == 8 and checked["parts"]["bubble"] > 0
    dense = {**raw, "axonn": grid(2, 1, 4, pipeline={})}
    whole = json.loads(asked(dense, f"{ASKED} --fix stages=4 --json -")[1])["checked"]
    assert checked["memory_parts_gb"]["gradients"] == pytest.approx(0.1 * whole["memory_parts_gb"]["gradients"])


def test_float32_takes_twice_the_room_and_bandwidth(asked):
    def checked(precision, stage, axonn=None):
        raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        return json.loads(asked(raw | precision | ({} if axonn is None else {"axonn": axonn}), f"{ASKED} --json -")[1])

    for stage, block in ((0, None), (1, grid(4, 2, 4)), (3, None)):
        half, whole = (checked(precision, stage, block) for precision in (BF16, {}))
        of_half, of_whole = (one["checked"]["memory_parts_gb"] for one in (half, whole))
        for part in ("weights", "gradients", "activations"):
            assert of_whole[part] == pytest.approx(2 * of_half[part])
        assert of_whole["optimizer"] == pytest.approx(of_half["optimizer"] * 8 / 12)  # no weights beside
        assert whole["checked"]["seconds"] > half["checked"]["seconds"]
        assert "bf16" in half["ds_config"] and not {"bf16", "fp16"} & whole["ds_config"].keys()
        assert "--bf16" in half["megatron"] and "--bf16" not in whole["megatron"]
    assert "memory and bandwidths count as of float32" in asked({"train_batch_size": 1024})[1]


def test_a_number_of_layers_or_bytes_that_stays_gathered(asked):
    """Of 32 layers of 4 products, 8 GPUs of x: the first 4 products are a layer."""

    def checked(cached, stages=1):
        raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, "axonn": grid(8, 1, 8), **BF16}
        raw["axonn"]["tensor_parallel"]["cache_gathers"] = cached
        staged = f" --fix stages={stages}" if stages > 1 else ""
        if staged:
            raw["axonn"]["pipeline"] = {}
        return json.loads(asked(raw, f"{ASKED}{staged} --json -")[1])["checked"]

    none, some, every = (checked(cached) for cached in (0, 64, "all"))
    held = [one["memory_parts_gb"]["weights"] for one in (none, some, every)]
    own, whole = 2 * 20.1 / 64, 2 * 20.1 / 8
    assert held[1] == pytest.approx(own + whole / 2, rel=0.01) and held[2] == pytest.approx(own + whole, rel=0.01)
    gathers = [one["collectives"]["gather"] for one in (none, some, every)]
    assert gathers[0] == pytest.approx(2 * gathers[2]) and gathers[1] == pytest.approx(1.5 * gathers[2])
    assert none["seconds"] > some["seconds"] > every["seconds"]
    # A quarter of a product more than one is as good as that, which backward needs room for in any case.
    assert checked(1)["memory_parts_gb"]["weights"] == held[0]
    assert checked("2GiB")["memory_parts_gb"]["weights"] == pytest.approx(own + 2 * 2**30 / 1e9, rel=0.01)
    alike = [(one["parts"], one["memory_parts_gb"]) for one in (every, checked("200GiB"), checked(128))]
    assert alike[0] == alike[1] == alike[2]
    assert checked(64, stages=2)["memory_parts_gb"] == checked("all", stages=2)["memory_parts_gb"]
    assert checked(32, stages=2)["collectives"]["gather"] == pytest.approx(
        1.5 * checked("all", stages=2)["collectives"]["gather"]
    )


def test_microbatches_in_a_pipeline_are_as_its_schedule_has_them(asked):
    def activations(**pipeline):
        raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, **BF16}
        options = "--model gpt-20b --machine perlmutter --gpus 256 --fix stages=4 --json -"
        raw["axonn"] = grid(2, 1, 4, pipeline=pipeline)
        return json.loads(asked(raw, options)[1])["checked"]["memory_parts_gb"]["activations"]

    four = activations(schedule="1f1b")
    assert activations() == pytest.approx(2 * four) and activations(pipeline_limit=4) == four  # of 32
    assert activations(schedule="1f1b", pipeline_limit=2) == pytest.approx(four / 2)
    assert activations(schedule="1f1b", pipeline_limit=7) == four
    assert activations(schedule="gpipe") == pytest.approx(8 * four)


def test_ranks_of_ted_split_layers_and_what_is_not_read_is_said(asked):
    raw = {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **BF16}
    code, out, err = asked(raw | {"axonn": {"ted": {"tensor": 4, "expert": 2}}})
    assert code == 0 and "gx=4 gy=1 gz=1 gdata=64" in out and "axonn.ted.expert = 2 is not read" in out, err
    keys = {"layout": "replicated", "regather_inputs": True, "cache_gathers": 4}
    block = grid(tensor_parallel=grid(2, 1, 4)["tensor_parallel"] | keys, samo={"pruner": {"mask": "mask.pt"}})
    said = asked(raw | {"axonn": block})[1]
    assert (
        all(f"axonn.tensor_parallel.{key}" in said for key in keys) and "axonn.samo does not say its sparsity" in said
    )


def test_the_way_of_attention_is_the_blocks(asked):
    def checked(**keys):
        raw = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **BF16}
        raw["axonn"] = grid(2, 1, {"batch": 2, "sequence": 8})
        raw["axonn"]["tensor_parallel"] |= keys
        asks = "--model llama3-8b --sequence 131072 --machine h100 --gpus 64 --recompute --json -"
        return json.loads(asked(raw, asks)[1])["checked"]

    gather, ring, heads, least = (checked(attention=way) for way in ("gather", "ring", "heads", "auto"))
    assert len({one["seconds"] for one in (gather, ring, heads)}) == 3 and checked() == least
    assert least["seconds"] in (gather["seconds"], heads["seconds"])
    own = 2 * 131072 / 8 * 4 * 256 / 1e9
    room = [one["memory_parts_gb"]["activations"] for one in (gather, ring)]
    assert room[0] - room[1] == pytest.approx(2 * (7 - 2) * own)


def test_sections_in_short_are_what_deepspeed_makes_of_them(asked):
    for short, stage in ((True, 1), (False, 0)):
        said = asked({"train_batch_size": 1024, "zero_optimization": short, **BF16})[1]
        assert f"ZeRO stage {stage}:" in said and "float32" not in said
    old = {"train_batch_size": 1024, "bfloat16": {"enabled": True}, "bf16": None}
    assert "float32" not in asked(old)[1]
    weights = {"train_batch_size": 1024, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, **BF16}
    assert "zero_optimization.offload_param is not modelled" in asked(weights)[1]


def test_offloaded_states_are_in_no_gpu(asked):
    stock = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    for raw in (stock, old, {"axonn": grid(offload_optimizer={})}):
        checked = json.loads(asked({"train_batch_size": 1024, **BF16, **raw}, f"{ASKED} --json -")[1])["checked"]
        assert checked["memory_parts_gb"]["optimizer"] == 0 < checked["memory_parts_gb"]["gradients"]
    off = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    checked = json.loads(asked({"train_batch_size": 1024, **BF16, **off}, f"{ASKED} --json -")[1])["checked"]
    assert checked["memory_parts_gb"]["optimizer"] > 0


def test_the_same_split_is_not_better(asked):
    """1D's model hides sums a little better than the grids' of the same configuration."""
    raw = {"train_batch_size": 16, "gradient_accumulation_steps": 1, "axonn": grid(), **BF16}
    options = "--model gpt3-xl --machine h100 --gpus 16 --strategy 1d"
    code, out, err = asked({**raw, "zero_optimization": {"stage": 1}}, options)
    assert code == 0 and "It does not fit" not in out, err
    assert "Better: 1d n1=1 np=1 nd=16" not in out


WRONG = [
    ({"train_batch_size": 1000, "axonn": grid(gz=64)}, ASKED, "train_batch_size = 1000 does not divide by gz*gdata = 64*4"),
    ({"train_batch_size": 1024, "axonn": grid(gx=3)}, ASKED, "--gpus = 256 is not a multiple of gx*gy*gz = 3"),
    ({"train_batch_size": 1024, "axonn": grid(gx=64)}, ASKED, "gx must divide 56 heads"),
    ({"train_batch_size": 1024, "axonn": {"tensor_parallel": {"gxx": 2}}}, ASKED, 'axonn.tensor_parallel.gxx is not a key; use "gx"'),
    ({"train_batch_size": 1024, "axonn": grid(), "zero_optimization": {"stage": 3}}, ASKED, "make gz larger"),
    ({"train_batch_size": 1024, "zero_optimization": {"stage": 4}}, ASKED, "zero_optimization.stage = 4 is not known"),
    ({"train_batch_size": 1024, "sequence_parallel_size": 2}, ASKED, "sequence_parallel_size splits sequences"),
    ({"train_batch_size": 1024}, f"{ASKED} --batch 512", "--batch = 512 is not train_batch_size = 1024"),
    ({"train_batch_size": True}, ASKED, "train_batch_size = True is not an integer"),
    ({"train_batch_size": 1024}, f"{ASKED} --fix gx=2", "--fix names gx, but --check takes sizes from"),
    ({"train_batch_size": 1024}, ASKED.replace("256", "256,512"), "--check is of one number of GPUs"),
    ({"train_batch_size": 1024}, f"{ASKED} --ted experts=4", "--ted experts=4 is TED's"),
    ({"train_batch_size": 1024}, f"{ASKED} --strategy 1d --interleave 2", "--interleave = 2, but stages of 4D grids"),
    ({"train_batch_size": 1024, "bf16": True}, ASKED, 'bf16 = True is not an object; write one, such as "bf16": {"enabled": true}'),
    ({"train_batch_size": 1024, "optimizer": "Adam"}, ASKED, 'optimizer = "Adam" is not an object; write it in braces'),
    ({"train_batch_size": 1024, "scheduler": {"params": {"total_num_steps": "x"}}}, ASKED, 'total_num_steps = "x" is not a number'),
    ({"train_batch_size": 1024, "fp16": "auto"}, ASKED, "fp16 = 'auto' is not an object"),
    ({"train_batch_size": 1024, "fp16": {"enabled": True}, **BF16}, ASKED, "bf16 and fp16 are both enabled"),
    ({"train_batch_size": 1024, "zero_optimization": 2}, ASKED, "zero_optimization = 2 is not an object"),
    ({"train_batch_size": 1024, "zero_optimization": {"stage": True}}, ASKED, "zero_optimization.stage = True is not known"),
    ("{", ASKED, "is not JSON"),
    ("[1]", ASKED, "holds no keys with values"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "options", "message"), WRONG)
def test_mistakes_are_one_sentence(raw, options, message, asked):
    code, out, err = asked(raw, options)
    assert code == 2 and not out and message in err
    assert err.startswith("axonn: error: ") and err.count("\n") == 1


def test_no_such_file(capsys):
    assert cli.main(f"plan --check missing.json {ASKED}".split()) == 2
    assert 'axonn: error: --check = "missing.json" cannot be read' in capsys.readouterr().err
