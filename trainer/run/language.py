"""The language models of a run, by its settings and by what its weights say of themselves."""

from pathlib import Path

from trainer.checkpoint.weights import CONFIG, read_hub_config
from trainer.config.config import Config
from trainer.errors import ConfigError
from trainer.models import Llama
from trainer.models.llama_hub import settings_of
from trainer.run.data import VOCABULARY


def make_llama(config: Config) -> Llama:
    """Make a llama by the settings, and for what they leave out by its weights' ``config.json``.

    Raises:
        ConfigError: If both say something, and not the same, about what the weights were made for.
            Only ``rope`` may differ, as one does to make the context longer.
    """
    model, given = config.model, config.model.settings
    published: dict[str, object] = {}
    if model.weights:
        path = Path(model.weights)
        found = read_hub_config(path)
        published = settings_of(found, where=str(path / CONFIG)) if found else {}
    for name, value in given.items():
        if name != "rope" and published.get(name, value) != value:
            raise ConfigError(
                f"model.{name} is {value!r}, expected {published[name]!r} as "
                f"{Path(model.weights) / CONFIG} has it; leave it out, or give other model.weights"
            )
    settings = {"vocabulary": VOCABULARY} | published | given
    return Llama(sequence_length=config.data.sequence_length, **settings)  # type: ignore[arg-type]
