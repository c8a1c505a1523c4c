"""Word vectors by skip-gram with negative sampling, whose gradients are sparse: only rows of a batch's words travel.

::

    python examples/word_vectors.py                              # 2 processes on CPU, half a minute
    python examples/word_vectors.py path=my_texts/ width=128 max_steps=20000 "show=[king,river]"
    python examples/word_vectors.py sync.sparse.dense_above=0    # whole tables travel instead
    python examples/word_vectors.py sync=parameter_server sync.parameter_server.staleness=4
    hierdist launch --hosts 2 --ranks-per-host 2 -- python examples/word_vectors.py

An application of its own that takes ``sync``, ``topology`` and ``parallel`` from the library: see word_vectors.yaml.
Mikolov et al., "Distributed representations of words and phrases and their compositionality", NeurIPS 2013.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from text_data import Text
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.data import DataLoader, Dataset

from lightning_dist import HierDistStrategy, RowWiseAdagrad
from lightning_dist.errors import ConfigError, LaunchError, TopologyError
from lightning_dist.launch import job


class Vocabulary:
    """Words by frequency: word 0 is the most frequent.

    Args:
        words: The text.
        min_count: Words that occur less often are left out.
    """

    def __init__(self, words: Sequence[str], *, min_count: int) -> None:
        counted = [(word, count) for word, count in Counter(words).most_common() if count >= min_count]
        if not counted:
            raise ConfigError(f"no word occurs {min_count} times in {len(words)} words: give more text by path=...")
        self.words = [word for word, _ in counted]
        self.counts = torch.tensor([count for _, count in counted])
        self.id_of = {word: index for index, word in enumerate(self.words)}

    def ids(self, words: Sequence[str]) -> Tensor:
        """Those of the words that it has."""
        return torch.tensor([self.id_of[word] for word in words if word in self.id_of])


class Pairs(Dataset[Tensor]):
    """Pairs of words that stand near each other.

    Args:
        ids: [n], the text.
        counts: [words], how often each occurs.
        window: Words on each side.
        keep_frequent: Words that are a larger share of the text are left out at random, the more the larger.
        seed: Of what is left out; the same on all ranks.
    """

    def __init__(self, ids: Tensor, counts: Tensor, *, window: int, keep_frequent: float, seed: int) -> None:
        share = counts / counts.sum()
        keep = (keep_frequent / share).sqrt().clamp(max=1.0)
        drawn = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))
        kept = ids[drawn < keep[ids]]
        near = [torch.stack([kept[:-distance], kept[distance:]]) for distance in range(1, window + 1)]
        self._pairs = torch.cat([*near, *(pair.flip(0) for pair in near)], dim=1)

    def __len__(self) -> int:
        return self._pairs.shape[1]

    def __getitem__(self, index: int) -> Tensor:
        return self._pairs[:, index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        """[2, batch]: a whole batch at once."""
        return self._pairs[:, indices]


class Batch(NamedTuple):
    """What a step trains on.

    Attributes:
        centers: [n].
        contexts: [n], words that stand near them.
        negatives: [n, negatives], words drawn at random.
    """

    centers: Tensor
    contexts: Tensor
    negatives: Tensor


class WithNegatives:
    """Makes batches of pairs, with words drawn at random: a batch has all words that its step will look up.

    Args:
        counts: [words], how often each occurs in the text.
        negatives: Words drawn for each pair.
    """

    def __init__(self, counts: Tensor, negatives: int) -> None:
        self._noise = counts**0.75
        self._negatives = negatives

    def __call__(self, pairs: Tensor) -> Batch:
        """Of [2, n] pairs."""
        drawn = torch.multinomial(self._noise, pairs.shape[1] * self._negatives, replacement=True)
        return Batch(pairs[0], pairs[1], drawn.view(-1, self._negatives))


class SkipGram(pl.LightningModule):
    """Two tables: what a word says of its context, and what a context says of its word.

    Args:
        words: How many there are.
        width: Numbers a vector has.
        optimizer: Name in torch.optim, or RowWiseAdagrad.
        lr: Learning rate.
    """

    def __init__(self, words: int, *, width: int, optimizer: str, lr: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, sparse=True)
        self.contexts = nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.contexts.weight)
        self.optimizer = optimizer
        self.lr = lr

    def rows_of_batch(self, batch: Batch) -> dict[str, Tensor]:
        """Which rows a step will look up, so that a parameter server can be asked in good time."""
        return {"words": batch.centers, "contexts": torch.cat([batch.contexts, batch.negatives.flatten()])}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        vectors = self.words(batch.centers)
        near = (vectors * self.contexts(batch.contexts)).sum(1)
        far = torch.bmm(self.contexts(batch.negatives), vectors.unsqueeze(2)).squeeze(2)
        loss = -(F.logsigmoid(near) + F.logsigmoid(-far).sum(1)).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = RowWiseAdagrad if self.optimizer == "RowWiseAdagrad" else getattr(torch.optim, self.optimizer)
        return kind(list(self.parameters()), lr=self.lr)  # type: ignore[no-any-return]

    def nearest(self, word: int, count: int) -> list[tuple[int, float]]:
        """The words whose vectors have the smallest angles with a word's, and their cosines."""
        vectors = F.normalize(self.words.weight.detach(), dim=1)
        cosines, found = (vectors @ vectors[word]).topk(count + 1)
        return [(int(i), float(c)) for i, c in zip(found, cosines, strict=True) if i != word][:count]


def train(config: DictConfig) -> None:
    """One run: train, then show which words are near which."""
    pl.seed_everything(config.seed, workers=True, verbose=False)
    text = Text(config.path)
    words = re.findall(r"[a-z]+(?:_[a-z]+)*", text.read(0, text.size).decode(errors="replace").lower())
    vocabulary = Vocabulary(words, min_count=config.min_count)
    unknown = [word for word in config.show if str(word).lower() not in vocabulary.id_of]
    if unknown:
        raise ConfigError(f"show={unknown}: not among the {len(vocabulary.words)} words that occur often enough")
    pairs = Pairs(
        vocabulary.ids(words),
        vocabulary.counts,
        window=config.window,
        keep_frequent=config.keep_frequent,
        seed=config.seed,
    )
    loader = DataLoader(
        pairs,
        batch_size=config.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=WithNegatives(vocabulary.counts, config.negatives),
    )
    model = SkipGram(len(vocabulary.words), width=config.width, optimizer=config.optimizer_name, lr=config.lr)
    trainer = pl.Trainer(
        strategy=HierDistStrategy(parallel=config.parallel, sync=config.sync, topology=config.topology),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", config.devices)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_steps=config.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        show(config, vocabulary, model, float(trainer.callback_metrics["loss"]))


def show(config: DictConfig, vocabulary: Vocabulary, model: SkipGram, loss: float) -> None:
    """Print the nearest neighbours of some words."""
    table = Table(title=f"Nearest of {len(vocabulary.words):,} words, loss {loss:.3f}", title_justify="left")
    table.add_column("word")
    table.add_column("nearest (cosine)")
    for word in map(str.lower, map(str, config.show)):
        found = model.nearest(vocabulary.id_of[word], config.neighbours)
        table.add_row(word, ", ".join(f"{vocabulary.words[i]} {cosine:.2f}" for i, cosine in found))
    Console().print(table)


@hydra.main(version_base="1.3", config_path=".", config_name="word_vectors")
@job
def main(config: DictConfig) -> None:
    """The task of one job."""
    try:
        train(config)
    except (ConfigError, LaunchError, TopologyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
