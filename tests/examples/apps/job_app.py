"""A Hydra application whose task is under `launch.job`."""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tiny import Tiny, loader, trainer, write_down

from lightning_dist.launch import job


@hydra.main(version_base="1.3", config_path="conf", config_name="app")
@job
def main(config: DictConfig) -> None:
    config.text = config.text + "!"  # edits are made once on every rank
    trained = trainer()
    trained.fit(Tiny(fail_on_rank=1 if config.fail else None), loader())
    folder = HydraConfig.get().runtime.output_dir
    write_down(folder, trained, config=OmegaConf.to_container(config, resolve=True), argv=sys.argv[1:])


if __name__ == "__main__":
    main()
