"""Translates what files of other trainers say of preference training: objective, loss, reference, length.

A loss or key whose formula differs from Mobius' is refused with both formulas, unless --objective (typed, or a key of
the file) says what to compute instead.
"""

from typing import Final

from mobius.config.objective import KTO_LOSSES, LossType, ObjectiveName
from mobius.config.recipes.dataset_info import Rows
from mobius.config.recipes.recipe import TheirFile

_STAGES: Final = {"dpo": ObjectiveName.DPO, "rm": ObjectiveName.REWARD, "kto": ObjectiveName.KTO}
"""Value of LLaMA-Factory's `stage` -> objective, which `pref_loss` may change."""
_OF_LLAMAFACTORY: Final = {
    **{loss: (ObjectiveName.DPO, LossType(loss)) for loss in ("sigmoid", "hinge", "ipo")},
    "simpo": (ObjectiveName.SIMPO, None),
}
"""Value of `pref_loss` with Mobius' formula -> objective, and its loss."""
_REFUSED_OF_LLAMAFACTORY: Final = {
    "orpo": "there the mean over pairs of -log p(answer) / tokens of the answer + beta x odds loss; --objective orpo "
    "has, as TRL, -log p of prompt and answer, a mean over all their tokens, + beta x odds loss. Type it to use that",
    "kto_pair": "not available; sigmoid, hinge, ipo and simpo are",
}
_SMOOTHED: Final = (
    "there -(1 - s) logsigmoid(x) - s logsigmoid(-x); --loss_type robust has (-(1 - s) logsigmoid(x) + s "
    "logsigmoid(-x)) / (1 - 2 s). Remove the key, or give --loss_type robust --label_smoothing"
)
_DPO_KEYS: Final = (
    *("beta", "loss_weights", "label_smoothing", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"),
    *("use_weighting", "discopop_tau", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model"),
    *("ref_model_mixup_alpha", "ref_model_sync_steps", "reference_free", "rpo_alpha", "max_prompt_length"),
)
"""Keys of TRL's DPOConfig, of this and earlier versions, that SFTConfig does not have."""
_DPO_LOSSES: Final = (LossType.SIGMOID, LossType.HINGE, LossType.IPO, LossType.ROBUST, LossType.APO_ZERO)
_CPO_KEYS: Final = ("cpo_alpha", "simpo_gamma", "alpha")
_KTO_KEYS: Final = ("desirable_weight", "undesirable_weight")
_KTO_LOSSES: Final = {*KTO_LOSSES}
_LOSSES_OF_SFT: Final = ("nll", "chunked_nll", "dft")
_OF_AXOLOTL: Final = {
    "dpo": (ObjectiveName.DPO, LossType.SIGMOID),
    "ipo": (ObjectiveName.DPO, LossType.IPO),
    "kto": (ObjectiveName.KTO, None),
    "orpo": (ObjectiveName.ORPO, None),
    "simpo": (ObjectiveName.SIMPO, None),
}
"""Value of Axolotl's `rl` -> objective and loss."""
_RL_KEYS: Final = (
    *("rl_beta", "orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "trl"),
    "dpo_label_smoothing",
)
_NO_EFFECT: Final = {
    "ld_alpha": ("1", "1.0"),  # 0 has the largest effect
    "f_divergence_type": ("reverse_kl",),
    "loss_weights": ("1", "1.0"),
    "alpha": ("0", "0.0"),
    **dict.fromkeys(("use_weighting", "sync_ref_model", "reference_free", "rpo_alpha", "pref_bco_weight"), ()),
}
"""Keys that change the loss, unless they have these values, or switch nothing on."""


_PREFERENCES: Final = (ObjectiveName.DPO, ObjectiveName.ORPO, ObjectiveName.SIMPO)
_READ: Final = (ObjectiveName.SFT, *_PREFERENCES, ObjectiveName.REWARD, ObjectiveName.KTO)
"""Objectives for which files are read."""


def _named(file: TheirFile) -> str:
    """Objective that the command line or Mobius' own key in the file names; empty if none does."""
    named = str(file.launch.typed.get("objective") or file.text("objective"))
    if named not in ("", *_READ):
        file.problems.append(f"--objective {named}: files of other tools are read for {', '.join(_READ)}")
    return named


def take_stage(file: TheirFile) -> Rows:
    """Translate LLaMA-Factory's `stage` and the keys that belong to dpo, rm and kto; returns the form of its data."""
    named, stage = _named(file), file.text("stage", "sft")
    objective = named or _STAGES.get(stage, ObjectiveName.SFT)
    rows = Rows.PAIRS
    if objective == ObjectiveName.REWARD:
        file.tell(
            "`stage: rm`: the score is that of AutoModelForSequenceClassification, which has no bias; LLaMA-Factory's "
            "value head has one, which cancels out in the loss, and a file of its own"
        )
    elif objective == ObjectiveName.KTO:
        rows = Rows.JUDGED
        _take_kto(file, "kto_chosen_weight", "kto_rejected_weight")
        file.put("beta", file.text("pref_beta", "0.1"), "pref_beta")
        if file.number("pref_ftx", 0):
            file.refuse("pref_ftx", "--objective kto has no cross entropy of good answers; remove the key")
        _take_reference(file)
    elif objective in _PREFERENCES:
        _take_pref_loss(file, named)
    else:
        return Rows.TEXTS if stage == "pt" else Rows.SAMPLES
    if not named and objective in (ObjectiveName.REWARD, ObjectiveName.KTO):
        file.put("objective", objective, "stage")
    for key in filter(file.is_on, ("train_on_prompt", "mask_history", "neat_packing", "do_predict")):
        file.refuse(key, "it is for `stage: sft`; remove the key")
    file.put("packing", "off")
    if file.is_on("packing"):
        file.tell("`packing: true`: a row has one sample, as in LLaMA-Factory, which packs none of them in this stage")
    if rows is Rows.PAIRS:
        _take_length(file, "cutoff_len", "2048")
    return rows


def _take_kto(file: TheirFile, desirable: str, undesirable: str) -> None:
    file.put("desirable_weight", file.text(desirable, "1"), desirable)
    file.put("undesirable_weight", file.text(undesirable, "1"), undesirable)
    file.tell("KL is the mean over all samples of a step; in the tool over a batch of all devices, before accumulation")


def _take_pref_loss(file: TheirFile, named: str) -> None:
    loss = file.text("pref_loss", "sigmoid")
    objective, loss_type = _OF_LLAMAFACTORY.get(loss, (ObjectiveName.DPO, None))
    if named:
        objective = ObjectiveName(named)
    elif loss not in _OF_LLAMAFACTORY:
        file.refuse("pref_loss", _REFUSED_OF_LLAMAFACTORY.get(loss, "it must be sigmoid, hinge, ipo or simpo"))
    else:
        file.put("objective", objective.value, "stage", "pref_loss")
    if objective is ObjectiveName.DPO and loss_type is not None:
        file.put("loss_type", loss_type.value, "pref_loss")
    file.put("beta", file.text("pref_beta", "0.1"), "pref_beta")
    if objective is ObjectiveName.SIMPO:
        file.put("simpo_gamma", file.text("simpo_gamma", "0.5"), "simpo_gamma")
    if file.number("pref_ftx", 0) and objective is not ObjectiveName.ORPO:
        file.put("sft_weight", file.text("pref_ftx"), "pref_ftx")
    elif file.number("pref_ftx", 0):
        file.refuse("pref_ftx", "--objective orpo has the cross entropy of the chosen answer already; remove the key")
    if file.number("dpo_label_smoothing", 0) and "label_smoothing" not in file.launch.typed:
        file.refuse("dpo_label_smoothing", _SMOOTHED)
    _refuse_other_losses(file, "ld_alpha", "pref_bco_weight")
    if objective is ObjectiveName.DPO:
        _take_reference(file)


def _take_reference(file: TheirFile) -> None:
    """Translate LLaMA-Factory's reference: another model, or else the model without adapters."""
    for key in filter(file.asks_for, ("ref_model_adapters", "ref_model_quantization_bit")):
        file.refuse(key, "the reference is a plain model; give the merged or unquantized one as ref_model")
    if file.asks_for("ref_model"):
        file.put("reference_model", file.text("ref_model"), "ref_model")
    elif file.asks_for("adapter_name_or_path") and file.text("finetuning_type", "lora") == "lora":
        file.put("reference_model", file.text("model_name_or_path"), "adapter_name_or_path")


def take_trl_objective(file: TheirFile) -> bool:
    """Translate TRL's keys of DPOConfig, KTOConfig, RewardConfig, and CPOConfig for SimPO; returns False for SFT."""
    losses = [name for name in file.names("loss_type") if name not in _LOSSES_OF_SFT]
    signs = [key for key in (*_DPO_KEYS, *_CPO_KEYS) if file.keys.get(key) is not None]
    named, center, task = _named(file), "center_rewards_coefficient", "lora_task_type"
    if file.keys.get(center) is not None or file.text(task).lower() == "seq_cls":
        found = ObjectiveName.REWARD
    elif {*losses} & _KTO_LOSSES or any(file.keys.get(key) is not None for key in _KTO_KEYS):
        found = ObjectiveName.KTO
    elif losses or signs:
        found = ObjectiveName.SIMPO if losses == ["simpo"] else ObjectiveName.DPO
    else:
        found = ObjectiveName.SFT
    objective = ObjectiveName(named) if named in _READ else found
    if objective is ObjectiveName.SFT:
        return False
    if not named:
        file.put("objective", objective.value, center, task, "loss_type", *_KTO_KEYS, *signs[:1])
    if "learning_rate" not in file.keys:
        file.put("learning_rate", "1e-4" if objective is ObjectiveName.REWARD else "1e-6")
    if objective is ObjectiveName.REWARD:
        file.put("center_rewards", file.text(center, "0"), center)
    else:
        _take_trl_loss(file, objective, losses, signs)
    length = "max_length" if "max_length" in file.keys or "max_seq_length" not in file.keys else "max_seq_length"
    if objective is not ObjectiveName.KTO and (length not in file.keys or file.keys[length] is not None):
        _take_length(file, length, "1024")
    return True


def _take_trl_loss(file: TheirFile, objective: ObjectiveName, losses: list[str], signs: list[str]) -> None:
    if not (_named(file) or losses or objective is ObjectiveName.KTO or any(key in file.keys for key in _CPO_KEYS)):
        file.tell(
            f"`{signs[0]}`: read as a file of `trl dpo`; --objective orpo, simpo or kto reads it as one of "
            "ORPOTrainer, CPOTrainer or `trl kto`"
        )
    file.put("beta", file.text("beta", "0.1"), "beta")
    if objective is ObjectiveName.DPO:
        _take_dpo_loss(file, losses)
    elif objective is ObjectiveName.SIMPO:
        _take_simpo(file)
    elif objective is ObjectiveName.KTO:
        _take_kto(file, *_KTO_KEYS)
        if losses:
            file.put("loss_type", ",".join(losses), "loss_type")
    if "max_prompt_length" in file.keys:
        file.tell(
            "`max_prompt_length`: prompts are not cut by themselves, as in TRL since 1.0; max_length cuts the end"
        )
    _refuse_other_losses(file, *(key for key in _NO_EFFECT if key in signs))


def _take_dpo_loss(file: TheirFile, losses: list[str]) -> None:
    if file.asks_for("cpo_alpha"):
        file.refuse("cpo_alpha", "CPO is not available; with `loss_type: simpo` and `cpo_alpha: 0` it is SimPO")
    (loss, *others) = losses or [LossType.SIGMOID.value]
    if others:
        file.refuse(
            "loss_type",
            "one loss at a time. TRL's `sft` is the mean cross entropy over all answer tokens of a microbatch; "
            "--sft_weight has the mean over each answer's tokens, then over pairs",
        )
    elif loss not in _DPO_LOSSES:
        file.refuse("loss_type", f"not available; {', '.join(_DPO_LOSSES)} and simpo are")
    else:
        file.put("loss_type", loss, "loss_type")
    if file.number("label_smoothing", 0) and loss == LossType.ROBUST.value:
        file.put("label_smoothing", file.text("label_smoothing"), "label_smoothing")
    elif file.number("label_smoothing", 0):
        file.tell(f"`label_smoothing` has no effect with `loss_type: {loss}`, as in TRL; --loss_type robust has it")


def _take_simpo(file: TheirFile, sign: str = "loss_type") -> None:
    file.put("simpo_gamma", file.text("simpo_gamma", "0.5"), "simpo_gamma")
    if file.number("cpo_alpha", 1) and not {"sft_weight"} & {*file.keys, *file.launch.typed}:
        file.refuse(
            "cpo_alpha" if "cpo_alpha" in file.keys else sign,
            "TRL adds cpo_alpha (default 1) x the cross entropy of prompt and chosen answer, a mean over all their "
            "tokens; --sft_weight has the mean over each answer's tokens, then over pairs. Set `cpo_alpha: 0`, or give "
            "--sft_weight",
        )
    if file.number("label_smoothing", 0):
        file.refuse("label_smoothing", "SimPO has none here; TRL's is -(1 - s) logsigmoid(x) - s logsigmoid(-x)")


def take_axolotl_objective(file: TheirFile) -> ObjectiveName:
    """Translate Axolotl's `rl` and its keys, which it passes to the trainers of TRL; returns the objective."""
    named, asked = _named(file), file.text("rl")
    found, loss = _OF_AXOLOTL.get(asked, (ObjectiveName.SFT, None))
    objective = ObjectiveName(named) if named in _READ else found
    trl = file.keys.get("trl")
    if objective is ObjectiveName.SFT:
        for key in filter(file.asks_for, _RL_KEYS):
            file.refuse(key, f"it belongs to `rl: {', '.join(_OF_AXOLOTL)}`, which the file does not have")
        return objective
    if not named:
        file.put("objective", objective.value, "rl")
    if objective is ObjectiveName.DPO:
        file.put("loss_type", (loss or LossType.SIGMOID).value, "rl")
    given = trl.get("beta") if isinstance(trl, dict) else None
    if isinstance(trl, dict) and (others := {name for name in trl if trl[name] is not None} - {"beta"}):
        file.refuse("trl", f"{', '.join(sorted(others))} cannot be taken; beta can")
    beta = given or file.text("rl_beta") or file.text("orpo_alpha")
    if objective is not ObjectiveName.REWARD:
        file.put("beta", beta or "0.1", "trl", "rl_beta", "orpo_alpha")
    if objective is ObjectiveName.SIMPO:
        _take_simpo(file, "rl")
    elif objective is ObjectiveName.KTO:
        _take_kto(file, "kto_desirable_weight", "kto_undesirable_weight")
    if file.number("dpo_label_smoothing", 0) and "label_smoothing" not in file.launch.typed:
        file.refuse(
            "dpo_label_smoothing", _SMOOTHED.replace("there", "TRL's sigmoid ignores it, in old versions it is")
        )
    if file.asks_for("lora_model_dir") and objective in (ObjectiveName.DPO, ObjectiveName.KTO):
        file.put("reference_model", file.text("base_model"), "lora_model_dir")
    file.put("packing", "off")
    if objective is not ObjectiveName.KTO:
        _take_length(file, "sequence_len", "512")
    return objective


def _refuse_other_losses(file: TheirFile, *keys: str) -> None:
    for key in keys:
        value = file.keys.get(key)
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        is_on = one is not None if key == "ld_alpha" else file.asks_for(key)
        if is_on and str(one) not in _NO_EFFECT[key]:
            file.refuse(key, "not available: it changes the loss of the pairs; remove the key")


def _take_length(file: TheirFile, key: str, default: str) -> None:
    """Translate the length of a sequence to that of a row, which holds both sequences of a pair."""
    length = int(file.number(key, float(default)))
    file.put("seq_length", str(2 * length), key)
    if "seq_length" not in file.launch.typed:
        file.facts.append(f"seq_length {2 * length} = 2 x {key} {length}, as a row holds both answers of a pair")
