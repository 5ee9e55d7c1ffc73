"""The language models of a run, by its settings and by what its weights say of themselves."""

from pathlib import Path

from tonari.trainer.checkpoint.weights import CONFIG, read_hub_config
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import GPT, Llama
from tonari.trainer.models.llama_hub import settings_of
from tonari.trainer.run.packed import check_vocabulary, vocabulary_of


def make_language_model(config: Config) -> GPT | Llama:
    """Make a gpt or a llama, of as many tokens as the text has unless the settings say more.

    Raises:
        ConfigError: If the text has more tokens than the model.
    """
    model = make_llama(config) if config.model.kind == "llama" else _make_gpt(config)
    model.packed = config.text.is_packed
    check_vocabulary(config, model)
    return model


def _make_gpt(config: Config) -> GPT:
    settings = {"vocabulary": vocabulary_of(config)} | config.model.settings
    return GPT(sequence_length=config.data.sequence_length, **settings)


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
    settings = {"vocabulary": vocabulary_of(config)} | published | given
    return Llama(sequence_length=config.data.sequence_length, **settings)  # type: ignore[arg-type]
