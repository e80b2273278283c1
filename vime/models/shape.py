"""The shape of a run's model: of the tiny one, of its folder, or as the recipe declares it. Without torch."""

from __future__ import annotations

from vime.config import Model, Shape, TinyModel
from vime.errors import UserError
from vime.models.family import family, read_shape
from vime.models.tiny import tiny_hf_config

_MAY_DIFFER = {"family", "context", "vocabulary", "tied_embeddings"}
"""Sizes in which a model's descendants differ from it, and the recipe's name for the family."""


def shape_of(model: Model) -> Shape:
    """The sizes of the tiny model, of the folder, or else of model.shape.

    Raises UserError when the family is unknown, when the folder is not supported, or when it is another model than
    model.shape says.
    """
    if model.tiny is not None:
        return tiny_shape(model.tiny)
    declared = declared_shape(model.shape) if model.shape is not None else None
    if model.path is None:
        assert declared is not None, "config.Model has exactly one origin"
        return declared
    try:
        found = read_shape(model.path)
    except UserError as error:
        raise UserError(f"model.path: {error}") from None
    if declared is None:
        return found
    for name in Shape.model_fields.keys() - _MAY_DIFFER:
        wanted, there = getattr(declared, name), getattr(found, name)
        if wanted is not None and there != wanted:
            raise UserError(
                f"model.path: {model.path} has {there} {name}, but model.shape.{name}={wanted}: is it"
                f" {model.name or 'the model that the recipe means'}?"
            )
    if declared.family not in (None, found.family):
        raise UserError(f"model.path: {model.path} is {found.family}, but model.shape.family={declared.family}")
    return found


def tiny_shape(tiny: TinyModel) -> Shape:
    """All sizes of a tiny model. Raises UserError when its family is unknown or cannot have them."""
    found = family(tiny.family, f"model.tiny.family={tiny.family}")
    return found.shape(found.parse(tiny_hf_config(tiny), "model.tiny"))


def declared_shape(shape: Shape) -> Shape:
    """A recipe's sizes, completed by what model.shape.family fixes. Raises UserError when they contradict it."""
    if shape.family is None:
        return shape
    found = family(shape.family, f"model.shape.family={shape.family}")
    if (shape.experts > 0) != found.experts:
        kind = "is a mixture of experts" if found.experts else "has none"
        raise UserError(f"model.shape.experts={shape.experts}: {shape.family} {kind}")
    fixed: dict[str, bool] = {}
    for name in ("qk_norm", "qkv_bias"):
        always, given = getattr(found, name), getattr(shape, name)
        if always is not None and given not in (None, always):
            raise UserError(f"model.shape.{name}={str(given).lower()}: in {shape.family} it is {str(always).lower()}")
        if always is not None:
            fixed[name] = always
    return shape.model_copy(update=fixed)
