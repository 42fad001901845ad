"""Every config that cannot work: exit code 2, one message with the numbers and the way out, no traceback, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_train.cli import main

GQA = [
    *("model.attention.kind=gqa", "model.attention.q_lora_rank=null", "model.attention.kv_lora_rank=0", "model.attention.v_head_dim=0"),
    *("model.attention.qk_nope_head_dim=0", "model.attention.qk_rope_head_dim=0", "model.attention.num_kv_heads=2"),
]
DENSE = ["model.first_dense_layers=3"]
ROUTER = "model.moe.router"

CASES: dict[str, tuple[list[str], list[str]]] = {
    # names
    "unknown key": (["train.stepss=3"], ["train.stepss", "`train.steps`"]),
    "unknown nested key": (["model.moe.topk=3"], ["`model.moe.top_k`"]),
    "added unknown key": (["+model.moe.topk=3"], ["`model.moe.top_k`"]),
    "forced unknown key": (["++trian.steps=3"], ["`train.steps`"]),
    "unknown group": (["modell=tiny_mla_moe"], ["`model`"]),
    "unknown choice of a group": (["model=tiny_mla"], ["`tiny_mla_moe`", "deepseek_v3"]),
    "unknown experiment": (["+experiment=smok"], ["`smoke`"]),
    "experiment without plus": (["experiment=smoke"], ["+experiment=NAME", "demo"]),
    "unknown value": (["optim.name=admw"], ["optim.name=admw", "`adamw`"]),
    "unknown item of a list": (["log.loggers=[tensorbord]"], ["`tensorboard`"]),
    "unknown FFN kind": (["model.ffn_pattern=[dense,mo]", "model.first_dense_layers=0"], ["`moe`"]),
    # types and grammar
    "wrong type": (["train.steps=abc"], ["train.steps", "'abc'", "Integer"]),
    "wrong bool": (["train.compile=maybe"], ["train.compile", "'maybe'"]),
    "null where a number belongs": (["train.steps=null"], ["train.steps", "not Optional"]),
    "a number for a section": (["model.moe=4"], ["model.moe"]),
    "a number for a group": (["train=3"], ["string"]),
    "no value": (["train.steps"], ["'train.steps' is no override", "key=value"]),
    "half a list": (["data.paths=[a"], ["data.paths=[a"]),
    "unknown interpolation": (["run.dir=${nope}"], ["run.dir", "nope"]),
    "two commands": (["--cfg", "job", "-m"], ["Only one of"]),
    # sizes
    "zero steps": (["train.steps=0"], ["train.steps=0", "above 0"]),
    "negative batch": (["train.global_batch=-4"], ["train.global_batch=-4"]),
    "zero micro-batch": (["train.micro_batch=0"], ["train.micro_batch=0"]),
    "nan rate": (["optim.lr=nan"], ["optim.lr=nan"]),
    "negative coefficient": (["balance.aux_coef=-0.1"], ["balance.aux_coef=-0.1"]),
    "negative seed": (["seed=-1"], ["seed=-1"]),
    "no layers": (["model.num_layers=0"], ["model.num_layers=0"]),
    # model
    "top-k above experts": (["model.moe.top_k=9"], ["top_k=9", "num_experts=8"]),
    "no experts": (["model.moe.num_experts=0"], ["num_experts=0", "first_dense_layers=3"]),
    "experts not divisible by groups": ([f"{ROUTER}.num_groups=3"], ["num_experts=8", "num_groups=3"]),
    "more chosen groups than groups": ([f"{ROUTER}.num_groups=2", f"{ROUTER}.topk_groups=3"], ["topk_groups=3", "num_groups=2"]),
    "top-k above the chosen groups": (["model.moe.top_k=3", f"{ROUTER}.num_groups=4"], ["top_k=3", "2 experts"]),
    "jitter": ([f"{ROUTER}.jitter=1.5"], ["jitter=1.5"]),
    "odd RoPE": (["model.attention.qk_rope_head_dim=7"], ["qk_rope_head_dim=7", "use 8"]),
    "odd RoPE of a part": ([*GQA, "model.attention.head_dim=6", "model.attention.rope.fraction=0.5"], ["3 rotated"]),
    "RoPE fraction": ([*GQA, "model.attention.rope.fraction=1.5"], ["fraction=1.5"]),
    "heads not divisible by KV heads": ([*GQA, "model.attention.num_kv_heads=3"], ["num_heads=4", "num_kv_heads=3", "1, 2, 4"]),
    "MLA without latent": (["model.attention.kv_lora_rank=0"], ["kv_lora_rank=0"]),
    "one mscale": (["model.attention.rope.scaling=yarn", "model.attention.rope.mscale=1"], ["mscale_all_dim=None"]),
    "dense layers without width": (["model.ffn_hidden_size=0"], ["ffn_hidden_size=0"]),
    "too many dense layers": (["model.first_dense_layers=9"], ["first_dense_layers=9", "num_layers=3"]),
    "scaled published model": (["model=deepseek_v3", "model.scale=2"], ["model.scale=2", "tiny_mla_moe"]),
    # data
    "sequence above the limit": (["data.seq_len=512"], ["seq_len=512", "max_seq_len=256"]),
    "sequence below MTP depth": (["data.seq_len=2", "model.mtp.depth=2"], ["seq_len=2", "depth=2"]),
    "vocabulary below the tokenizer's": (["model.vocab_size=512"], ["model.vocab_size=512", "data.vocab_size=1024"]),
    # training
    "global batch not divisible": (["train.micro_batch=3"], ["global_batch=16", "micro_batch=3", "micro_batch=2"]),
    "warm-up above steps": (["optim.schedule.warmup_steps=9"], ["warmup_steps=9", "steps=8"]),
    "decay does not fit": (["optim.schedule.name=wsd", "optim.schedule.decay_steps=9"], ["decay_steps=9", "steps=8"]),
    "betas": (["optim.betas=[0.9]"], ["betas=[0.9]"]),
    "nothing to recompute": (["train.recompute=selective", "train.recompute_parts=[]"], ["experts"]),
    # parallel
    "layout that cannot be": (["parallel.dp_shard=3", "parallel.ep=2"], ["3 processes", "ep 2"]),
    "experts not divisible by ep": (["parallel.dp_shard=3", "parallel.ep=3"], ["8 experts", "ep=3"]),
    "heads not divisible by tp": (["parallel.tp=3"], ["4 attention heads", "tp=3"]),
    "batch not divisible by dp": (["parallel.dp_shard=8", "train.micro_batch=4"], ["global_batch=16", "= 32"]),
    "several processes": (["parallel.tp=2"], ["one process", "2 processes"]),
    # options without effect
    "groups without limit": ([f"{ROUTER}.group_score=max"], ["group_score=max", "num_groups=1"]),
    "window of MLA": (["model.attention.sliding_window=8"], ["sliding_window=8", "kind=mla"]),
    "latents of GQA": (
        ["model.attention.kind=gqa", "model.attention.num_kv_heads=2"],
        ["q_lora_rank=32", "kind=gqa"],
    ),
    "YaRN off": (["model.attention.rope.factor=4"], ["factor=4.0", "scaling=none"]),
    "order of a sigmoid": ([f"{ROUTER}.softmax_order=after_topk"], ["softmax_order", "score=sigmoid"]),
    "limit of plain SwiGLU": (["model.swiglu_limit=5"], ["swiglu_limit=5.0", "activation=swiglu"]),
    "drop without capacity": (["model.moe.drop_policy=position"], ["drop_policy=position", "capacity_factor=null"]),
    "parts without selective": (["train.recompute_parts=[ffn]"], ["recompute_parts=[ffn]", "recompute=none"]),
    "balance without experts": (
        [
            *DENSE,
            "model.moe={num_experts:0,top_k:0,expert_hidden_size:0,num_shared_experts:0}",
            f"{ROUTER}.score=softmax",
            f"{ROUTER}.selection_bias=false",
        ],
        ["balance.bias=sign", "no MoE layer", "balance=none"],
    ),
    "experts without layers": ([*DENSE, "balance=none"], ["num_experts=8", "no MoE layer"]),
    "rate without the sign rule": (["balance=quantile", "balance.bias_rate=0.1"], ["bias_rate=0.1", "bias=quantile"]),
    "bias with Sinkhorn": (["balance.sinkhorn_iterations=3"], ["bias=sign", "Sinkhorn"]),
    "bias with forced balance": ([f"{ROUTER}.force_balanced=true"], ["bias=sign", "force_balanced"]),
    "a rate without end": (["optim.lr=inf"], ["optim.lr=inf", "finite number"]),
    "quantile outside [0, 1]": (["balance=quantile", f"{ROUTER}.score=sqrt_softplus"], ["sqrt_softplus", "balance=bias"]),
    "quantile within groups": (
        ["balance=quantile", f"{ROUTER}.num_groups=4", f"{ROUTER}.topk_groups=2"],
        ["num_groups=4", "balance=bias"],
    ),
    "quantile after top-k": (["balance=quantile", f"{ROUTER}.score=softmax", f"{ROUTER}.softmax_order=after_topk"], ["after_topk"]),
    "Muon's number for AdamW": (["optim.muon_steps=3"], ["muon_steps=3", "optim.name=adamw"]),
    "decay of a constant rate": (["optim.schedule.name=constant", "optim.schedule.decay_steps=3"], ["decay_steps=3", "constant"]),
    "ramp without start": (["train.batch_ramp.steps=3"], ["batch_ramp.steps=3"]),
    "paths of the embedded data": (["data.paths=[x]"], ["data.paths=[x]", "kind=python_stdlib"]),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_refused(case: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, texts = CASES[case]
    base = ["+experiment=smoke"] if not any("experiment=" in override for override in overrides) else []
    assert main(["pretrain", *base, *overrides]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("moe-train: error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in out + err
    for text in texts:
        assert text in err, err
    assert not list(tmp_path.iterdir()), "a refused config must leave nothing behind"


def test_a_world_of_several_processes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["pretrain", "+experiment=smoke", "parallel.dp_shard=-1"]) == 2
    assert "WORLD_SIZE=2" in capfd.readouterr().err


@pytest.mark.parametrize("value", ["two", "", "0", "-1", "1.5"])
def test_a_world_that_is_no_number(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    assert main(["pretrain", "+experiment=smoke"]) == 2
    assert f"WORLD_SIZE={value!r}" in capfd.readouterr().err
