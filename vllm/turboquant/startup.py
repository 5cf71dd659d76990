# SPDX-License-Identifier: Apache-2.0
"""Gives a starting engine its constants: a profile that is found, or one fitted on the spot.

`--additional-config '{"tdsf_calibration": MODE}'` or, unset, $VLLM_TQ_CALIBRATION:

    auto      use the model's profile; where there is none, fit it and keep it (the default)
    require   use the model's profile; where there is none, do not start
    off       fixed constants that suit any model and no model well
    PATH      use this profile file

`--additional-config '{"tdsf_strict": true}'` or VLLM_TQ_STRICT=1: the formula alone is the scale of
a token. Such profiles are fitted and kept apart.
"""

import contextlib
import os
import time
from pathlib import Path

from vllm.logger import init_logger
from vllm.turboquant import registry, worker
from vllm.turboquant.calibrate import BUILT_IN_TEXT, CannotFit, Fit, calibrate, install
from vllm.turboquant.formats import FORMATS, Format
from vllm.turboquant.identity import ModelIdentity, identify, locate
from vllm.turboquant.profile import Profile, write

logger = init_logger(__name__)

OPTION = "tdsf_calibration"
STRICT = "tdsf_strict"
LATER = "later"
"""The mode of an engine whose starter installs constants itself."""


def prepare(core) -> None:
    """Called at the end of upstream's `EngineCore.__init__`, before any request.

    Raises ValueError where the mode demands a profile and none can be used.
    """
    fmt = FORMATS.get(core.vllm_config.cache_config.cache_dtype)
    if fmt is None:
        return
    chosen = mode(core.vllm_config)
    if chosen == LATER:
        return
    if chosen == "off" and strict(core.vllm_config):
        core.shutdown()
        raise ValueError(
            "Strict TDSF needs a fitted formula, and calibration is off.\n"
            "Set tdsf_calibration to auto, or leave tdsf_strict away."
        )
    if chosen == "off":
        logger.warning("TDSF: calibration is off; the %s cache runs uncalibrated.", fmt.name)
        return
    try:
        _constants(core, fmt, chosen)
    except BaseException:
        core.shutdown()  # nobody else knows of the workers yet
        raise


def mode(vllm_config) -> str:
    """What the user asked for, see above."""
    config = vllm_config.additional_config
    named = config.get(OPTION) if isinstance(config, dict) else None
    return str(named or os.environ.get("VLLM_TQ_CALIBRATION") or "auto")


def strict(vllm_config) -> bool:
    """Whether strict TDSF was asked for, see above. Raises ValueError for an unclear answer."""
    config = vllm_config.additional_config
    named = config.get(STRICT) if isinstance(config, dict) else None
    asked = named if named is not None else os.environ.get("VLLM_TQ_STRICT") or False
    known = {True: True, "1": True, "true": True, False: False, "0": False, "false": False}
    if asked not in known:
        raise ValueError(f"{STRICT} is {asked!r:.40}; it is true or false")
    return known[asked]


def identity_of(vllm_config) -> ModelIdentity:
    """Identity of the model that an engine serves. Raises ValueError where it has none."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        raise ValueError("The model has dummy weights.")
    return identify(locate(model.model, model.revision, load.download_dir))


def _constants(core, fmt: Format, chosen: str) -> None:
    formula = strict(core.vllm_config)
    try:
        identity = identity_of(core.vllm_config)
    except ValueError as error:
        identity = None
        logger.warning("TDSF: the model cannot be identified: %s", error)
    if chosen not in ("auto", "require"):
        any_model = os.environ.get("VLLM_TQ_ANY_PROFILE") == "1"
        profile = registry.open_profile(
            Path(chosen), identity, fmt, strict=formula, any_model=any_model
        )
        if profile.model != identity:
            logger.warning("TDSF: a profile of another model is forced: %s.", profile.model)
        return _use(core, Path(chosen), profile)
    if identity is not None and (path := registry.find(identity, fmt, formula)):
        try:
            return _use(core, path, _complete(core, path, identity, fmt, formula))
        except ValueError as error:
            if chosen == "require":
                raise
            logger.warning("TDSF: %s", error)
    if chosen == "require":
        raise ValueError(
            f"No TDSF profile for {identity or 'this model'} and {fmt.name} was found.\n"
            f"Fit one: vllm turboquant calibrate --model {core.vllm_config.model_config.model} "
            f"--kv-cache-dtype {fmt.name}{' --strict' if formula else ''}"
        )
    try:
        _fit_once(core, identity, fmt, formula)
    except CannotFit as reason:
        logger.warning(
            "TDSF: no profile, and none is fitted at start-up: %s. The %s cache runs uncalibrated; "
            "`vllm turboquant calibrate` makes a profile.",
            *(reason, fmt.name),
        )


def _complete(core, path: Path, identity: ModelIdentity, fmt: Format, formula: bool) -> Profile:
    """The profile at `path`, if it has all layers that this engine compresses.

    One that was fitted while --kv-cache-dtype-skip-layers left layers out lacks those."""
    profile = registry.open_profile(path, identity, fmt, strict=formula)
    layers = {x for names in core.collective_rpc(worker.cached_layers) for x in names}
    if missing := sorted(layers - set(profile.layers)):
        raise ValueError(f"{path} has no constants for {', '.join(missing)}")
    return profile


def _use(core, path: Path, profile: Profile) -> None:
    install(core, profile.layers)
    logger.info("TDSF: constants from the profile %s.", path)


def _fit_once(core, identity: ModelIdentity | None, fmt: Format, formula: bool) -> None:
    """Fit and keep a profile, unless another process does so meanwhile."""
    if identity is None:
        _fit(core, formula)
        return
    path = registry.cached_path(identity, fmt, formula)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(registry.locked(path))
        except OSError as error:
            logger.warning("TDSF: no profile can be kept: %s", error)
            _fit(core, formula)
            return
        if path.is_file():
            try:
                return _use(core, path, _complete(core, path, identity, fmt, formula))
            except ValueError:
                logger.warning("TDSF: the unusable profile is replaced.")
        fit = _fit(core, formula)
        try:
            write(Profile(identity, fmt, fit.layers, fit.fitted_on, fit.quality), path)
            logger.info("TDSF: the profile is kept as %s.", path)
        except OSError as error:
            logger.warning("TDSF: the profile cannot be kept: %s", error)


def _fit(core, formula: bool) -> Fit:
    if core.is_pooling_model:
        raise CannotFit("it is a pooling model")
    if core.vllm_config.parallel_config.data_parallel_size > 1:
        raise CannotFit("data parallel engines step together")
    logger.info("TDSF: this model has no profile yet; fitting one on the built-in text.")
    start = time.monotonic()
    fit = calibrate(core, BUILT_IN_TEXT.read_text(encoding="utf-8"), strict=formula)
    logger.info(
        "TDSF: %d layers fitted in %.1f s; KL to the uncompressed cache %.5f nats per token.",
        *(len(fit.layers), time.monotonic() - start, fit.quality["kl"]),
    )
    return fit
