"""GRPO on TRL, fed with logged rows: one GPU, many, or many machines, as `accelerate launch` says. `pyproject.toml`
pins TRL's release, since this rests on methods that TRL keeps private.

Where it departs from TRL's own GRPO:
1. Nothing is sampled. `rollout_func` hands out the logged prompt, plan tokens and log-probs, in an order known before.
2. The ratio is taken against the *logged* log-probs (`old_per_token_logps`), not against a recomputation: what verl
   calls bypass mode. TRL itself would use them only beside a live vLLM.
3. Advantages come from `policy.train.engines.rows`; TRL's groups would need G samples of each prompt.
4. Where rows bring the grammar masks they were sampled under, log-probs are taken under the same masks.
The loss, its token normalisation, accumulation, checkpoints and distribution are TRL's.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gateway.core.policies.manifest import ADAPTER_CONFIG_FILE
from gateway.errors import BadRequest, ConfigError, Unavailable, VersionRefused
from policy.serve.lora import read_config
from policy.train.engines.memory import check, host_bytes, memory
from policy.train.engines.rows import Bits, EngineRow, EngineSettings, Prepared, order, prepare
from policy.train.engines.trl_arguments import grpo_config
from policy.train.step.forward import token_entropy, token_logprobs
from policy.train.step.grpo import log_ratio
from policy.train.step.measures import ratio_metrics
from policy.train.weights.start import MODEL_FILES

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env
        from datasets import Dataset
        from peft import LoraConfig, PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from transformers.trainer_callback import PrinterCallback
        from transformers.utils import logging as transformers_logging
        from trl import GRPOTrainer
        from trl.trainer.utils import RepeatSampler
except ImportError as error:
    raise ConfigError(f"TRL is not installed ({error.name}); scripts/install trl adds it") from None

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left", "PytorchStreamWriter failed")
Finish = Callable[[Path, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out: `rows` taught something, of `rows_read`; `log`: TRL's metrics, one mapping a step."""

    directory: Path
    steps: int
    rows: int
    rows_read: int
    log: tuple[Mapping[str, float], ...]
    first: bool  # of the processes that trained together: the one that speaks
    processes: int


def train_with_trl(
    rows: Sequence[EngineRow],
    model_dir: Path,
    out: Path,
    settings: EngineSettings,
    *,
    work: Path,
    adapter: Path | None = None,
    resume: bool = False,
    finish: Finish | None = None,
    callbacks: Sequence[Any] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Trained | None:
    """Train the model of `model_dir` on logged rows; every process of an `accelerate launch` calls this alike.

    OUT appears whole or not at all: the weights (or, with `lora_rank`, a PEFT adapter) beside the tokenizer's files.
    `adapter`: the directory of a PEFT adapter over the model; training goes on with it, at its rank.
    `finish` is called on it before it gets its name, by one process, with the probe of the new weights. WORK holds
    checkpoints and metrics.jsonl; with `resume` it goes on from the last complete checkpoint there. Returns None if a
    `Stopping` was asked first. Raises MissingLogprobs, BadRequest and ConfigError on what it can't take.
    """
    prepared = prepare(rows, settings)
    if out.exists():
        raise BadRequest(f"{out} is there already; name a new directory")
    trainer = make_trainer(prepared, model_dir, work, settings, [_Metrics(work, say), *callbacks], adapter, say)
    with quiet(), _on_disk(work):
        trainer.train(resume_from_checkpoint=last_checkpoint(work) if resume else None)
        if trainer.state.global_step < settings.steps:
            return None
        _save(trainer, model_dir, out, finish)
    log = tuple(one for one in trainer.state.log_history if "loss" in one)
    counts = (trainer.state.global_step, len(prepared), len(rows))
    return Trained(out, *counts, log, trainer.is_world_process_zero(), trainer.accelerator.num_processes)


def make_trainer(
    prepared: Sequence[Prepared],
    model_dir: Path,
    work: Path,
    settings: EngineSettings,
    callbacks: Sequence[Any] = (),
    adapter: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> LoggedGRPOTrainer:
    """The trainer before its first step. Raises BadRequest and ConfigError as `grpo_config`, and ConfigError where the
    device has less memory than the run takes."""
    with quiet():
        arguments = grpo_config(work, settings)  # first: it refuses before any weights are read
        say(_room(prepared, model_dir, settings, adapter))
        trainer = LoggedGRPOTrainer(
            prepared,
            model=_model(model_dir, settings, adapter),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [str(index) for index in order(len(prepared), settings)]}),
            processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
            callbacks=list(callbacks),
            peft_config=None if adapter else _lora(settings),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _room(prepared: Sequence[Prepared], model_dir: Path, settings: EngineSettings, adapter: Path | None) -> str:
    """What the run takes of each device, in a line. Raises ConfigError where that is more than the device has."""
    prompt, plan = (max(len(getattr(one.row, name)) for one in prepared) for name in ("prompt_ids", "plan_ids"))
    processes = PartialState().num_processes
    split = any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    rank = read_config(adapter)[0] if adapter else settings.lora_rank
    try:
        found = memory(model_dir, settings, prompt, plan, shards=processes if split else 1, rank=rank)
    except VersionRefused:
        return "memory of a device: not computed for this kind of model"
    if torch.cuda.is_available():
        check(found, torch.cuda.mem_get_info()[1], torch.cuda.get_device_name())
    else:
        check(found, host_bytes() // processes, "this machine's share for one process")
    return found.line()


@contextmanager
def quiet() -> Iterator[None]:
    """TRL's and torch's advice is for those who write trainers, and bars are the caller's; errors stay errors."""
    with warnings.catch_warnings(action="ignore"):
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()


@contextmanager
def _on_disk(work: Path) -> Iterator[None]:
    """A full disk as one line; torch's and safetensors' own writers raise errors of their own for one."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if getattr(error, "errno", None) not in FULL and not any(word in str(error) for word in FULL_WORDS):
            raise
        raise Unavailable(
            f"{work}: cannot be written ({str(error).splitlines()[0]}); free some space and run again with --resume: "
            "the checkpoints before it are complete"
        ) from None


def last_checkpoint(work: Path) -> str | None:
    """The newest complete one: the trainer's state is what transformers writes last."""
    complete = {
        int(one.parent.name.rpartition("-")[2]): one.parent for one in work.glob("checkpoint-*/trainer_state.json")
    }
    return str(complete[max(complete)]) if complete else None


class LoggedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer over rows that were sampled when they were served."""

    def __init__(self, prepared: Sequence[Prepared], **given: Any) -> None:
        self._prepared = prepared
        self._allowed: Tensor | None = None
        self._scored: Tensor | None = None
        super().__init__(reward_funcs=logged_reward, rollout_func=hand_out, **given)

    def hand_out(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """What was logged under these names, as TRL wants a rollout."""
        chosen = [self._prepared[int(name)] for name in names]
        masks = [one.row.allowed for one in chosen]
        self._allowed = None if masks[0] is None else self._padded([mask or () for mask in masks])
        return {
            "prompt_ids": [list(one.row.prompt_ids) for one in chosen],
            "completion_ids": [list(one.row.plan_ids) for one in chosen],
            "logprobs": [list(one.row.logprobs or ()) for one in chosen],
            "env_mask": [[int(x) for x in one.trains] for one in chosen],
            "advantage": [one.advantage for one in chosen],
            "reward": [one.row.reward for one in chosen],
        }

    def probe(self) -> dict[str, Any]:
        """A logged sequence with the log-probs that these weights give it, without mask, at temperature 1: what a swap
        is proven by. All processes take part."""
        row = self._prepared[0].row
        ids = torch.tensor([[*row.prompt_ids, *row.plan_ids]], device=self.accelerator.device)
        with torch.no_grad(), self.accelerator.autocast():
            logits = self.model_wrapped(input_ids=ids).logits[:, len(row.prompt_ids) - 1 : -1]
        logprobs = token_logprobs(logits, ids[:, len(row.prompt_ids) :])[0].tolist()
        return {"prompt_ids": list(row.prompt_ids), "token_ids": list(row.plan_ids), "logprobs": logprobs}

    def _padded(self, masks: Sequence[Sequence[Bits]]) -> Tensor:
        """[rows, longest plan, bytes]; padding allows everything."""
        longest = max(map(len, masks))
        found = torch.full((len(masks), longest, len(masks[0][0])), 255, dtype=torch.uint8)
        for row, mask in enumerate(masks):
            for place, bits in enumerate(mask):
                found[row, place] = torch.from_numpy(bits.copy())
        return found.to(self.accelerator.device)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """In the given order; each step's rows as often as TRL asks for them while it accumulates."""
        repeats = self.num_iterations * self.args.steps_per_generation
        return RepeatSampler(self.train_dataset, 1, self.args.generation_batch_size, repeats, shuffle=False)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        out["old_per_token_logps"] = out["sampling_per_token_logps"]
        out["advantages"] = torch.tensor([one["advantage"] for one in inputs], device=self.accelerator.device)
        if self._allowed is not None:
            out["allowed"] = self._allowed
        self._metrics["train"].pop("frac_reward_zero_std", None)  # of TRL's groups, which are not ours
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._allowed = inputs.get("allowed")
        loss: Tensor = super()._compute_loss(model, inputs)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        if self._scored is not None:
            for name, value in ratio_metrics(
                log_ratio(self._scored, inputs["old_per_token_logps"], mask), mask
            ).items():
                self._metrics["train"][name].append(value)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **given: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ids = (input_ids, attention_mask, logits_to_keep)
        if self._allowed is None:
            found: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
                model, *ids, **given
            )
        else:
            found = self._under_masks(model, *ids, self._allowed, given.get("batch_size") or len(input_ids))
        self._scored = found[0].detach()
        return found

    def _under_masks(
        self, model: Any, ids: Tensor, attention: Tensor, keep: int, bits: Tensor, rows_max: int
    ) -> tuple[Tensor, Tensor, None]:
        logprobs, entropies = [], []
        for start in range(0, len(ids), rows_max):
            part, heat = slice(start, start + rows_max), self.temperature
            with self.accelerator.autocast():
                out = model(input_ids=ids[part], attention_mask=attention[part], logits_to_keep=keep + 1)
            logits = out.logits[:, :-1]
            allowed = unpacked(bits[part, :keep], logits.shape[-1])
            logprobs.append(token_logprobs(logits, ids[part, -keep:], temperature=heat, allowed=allowed))
            spread = logits if self.args.entropy_coef else logits.detach()
            entropies.append(token_entropy(spread, temperature=heat, allowed=allowed))
        return torch.cat(logprobs), torch.cat(entropies), None


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """[…, bytes] uint8, lowest bit first, as […, vocab] bool."""
    each = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[..., None] >> each & 1).flatten(-2)[..., :vocab].bool()


def hand_out(prompts: list[str], trainer: LoggedGRPOTrainer) -> dict[str, list[Any]]:
    """TRL's `rollout_func`."""
    return trainer.hand_out(prompts)


def logged_reward(reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: what the row says. Only its metrics use it."""
    return reward


class _Metrics(TrainerCallback):  # type: ignore[misc]
    """One JSON object a step, by one process."""

    def __init__(self, work: Path, say: Callable[[str], None]) -> None:
        self._path = work / "metrics.jsonl"
        self._say = say

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            if "loss" in logs:
                figures = ", ".join(f"{name} {logs[name]:.4g}" for name in ("reward", "ratio_mean", "entropy"))
                self._say(f"step {state.global_step} of {state.max_steps}: {figures}")


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Set `asked`, and training ends after the step at hand, with a checkpoint."""

    asked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        asked = torch.tensor(int(self.asked), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)  # all leave after the same step
        if asked:
            control.should_save = control.should_training_stop = True
        return control


def _model(directory: Path, settings: EngineSettings, adapter: Path | None) -> Any:
    """Full weights train in float32 (bf16 is then what is computed in); under an adapter they rest in bf16."""
    adapted = adapter is not None or settings.lora_rank > 0
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16 if settings.bf16 and adapted else torch.float32
        )
        return model if adapter is None else PeftModel.from_pretrained(model, adapter, is_trainable=True)
    except (OSError, ValueError) as error:
        raise BadRequest(f"{directory}: no model that transformers loads ({str(error).splitlines()[0]})") from None


def _lora(settings: EngineSettings) -> Any:
    if not settings.lora_rank:
        return None
    return LoraConfig(
        r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _save(trainer: LoggedGRPOTrainer, model_dir: Path, out: Path, finish: Finish | None) -> None:
    """Every process takes part in gathering sharded weights; one writes."""
    part = out.with_name(f".{out.name}.part")
    main = trainer.accelerator.is_main_process
    if main and part.exists():
        shutil.rmtree(part)
    trainer.accelerator.wait_for_everyone()
    probe = trainer.probe()
    trainer.save_model(str(part))
    if main:
        if not (part / ADAPTER_CONFIG_FILE).is_file():
            for name in MODEL_FILES:
                if (model_dir / name).is_file():
                    shutil.copyfile(model_dir / name, part / name)
        (part / "training_args.bin").unlink(missing_ok=True)
        if finish is not None:
            finish(part, probe)
        part.rename(out)
    trainer.accelerator.wait_for_everyone()
