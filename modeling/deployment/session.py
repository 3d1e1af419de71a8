# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
Runs an AdaPerceiver bundle: tokens, width, depth, early exit and budgets are chosen at every call, without PyTorch.

    from session import AdaptiveSession    # this file lies in the bundle

    session = AdaptiveSession("bundle", runtime="onnxruntime")    # or "openvino"
    predictions = session([image], tokens=64, exit_threshold=0.9)
    print(predictions.labels, predictions.points)

It needs numpy, Pillow and the runtime. A bundle holds one file of weights and graphs that share it: `embed` (pixels to input
tokens), `read` (to latents), segments of blocks, one set for each width, and `readout` (to predictions). Their shapes leave the
number of latents open, so that one set of loaded weights serves every token count.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps


FORMAT = 1
MANIFEST = "manifest.json"
AXES = ("tokens", "width", "depth")
BUDGETS = ("max_gflops", "max_latency_ms")
HIDDEN = np.float32(-1e9)  # added to the scores of latents that a latent does not see


@dataclass
class Predictions:
    """What a call returns. Which of the properties there are depends on the task; `outputs` holds the plain arrays."""

    outputs: dict[str, np.ndarray]
    points: list[dict[str, int]]  # where each image ran: tokens, width, and depth, which is that of its exit
    names: list[str]  # of the classes

    @property
    def logits(self) -> np.ndarray:
        """(images, classes), or (images, classes, height, width)"""
        return self.outputs["logits"]

    @property
    def probabilities(self) -> np.ndarray:
        return softmax(self.logits, axis=1)

    @property
    def labels(self) -> list[str]:
        """The name of the likeliest class of each image."""
        return [self.names[index] for index in self.logits.argmax(axis=1)]

    @property
    def masks(self) -> np.ndarray:
        """The likeliest class of each pixel: (images, height, width), at the size that the network sees."""
        return self.logits.argmax(axis=1)

    @property
    def depths(self) -> np.ndarray:
        """Metres: (images, height, width), at the size that the network sees."""
        return self.outputs["predicted_depth"]


class AdaptiveSession:
    """A bundle, run by `runtime` on `threads` threads (the runtime's default if not given). Graphs load when first used."""

    def __init__(self, folder: str | Path | None = None, runtime: str = "onnxruntime", threads: int | None = None):
        self.folder = Path(__file__).parent if folder is None else Path(folder)
        if runtime not in RUNTIMES:
            raise ValueError(f"`runtime` must be one of {', '.join(RUNTIMES)}, got {runtime!r}.")
        if threads is not None and threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}.")
        path = self.folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"`folder` must be a bundle, with a {MANIFEST}, got {self.folder}.")
        self.manifest = json.loads(path.read_text(encoding="utf-8"))
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"`folder` must be a bundle of format {FORMAT}, {self.folder} has {self.manifest['format']}."
            )
        self.runtime = runtime
        self.load = RUNTIMES[runtime](self.folder, threads)
        self.loaded: dict[str, Callable[[dict[str, np.ndarray]], list[np.ndarray]]] = {}
        self.profiles: dict[int, dict[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------------------- calls

    def __call__(
        self,
        images: Any,
        tokens: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        exit_threshold: float | bool | None = None,
        max_gflops: float | bool | None = None,
        max_latency_ms: float | bool | None = None,
    ) -> Predictions:
        """
        `images`: a PIL image or an array of one, (height, width, channels) from 0 to 255, or a list of them; or their pixel
        values, a float array (images, channels, height, width). What is not given is the default of the checkpoint, or else
        the full model. `False` turns off a threshold or a budget of the checkpoint.
        """
        pixel_values = self.preprocess(images)
        given = {
            "tokens": tokens,
            "width": width,
            "depth": depth,
            "exit_threshold": exit_threshold,
            "max_gflops": max_gflops,
            "max_latency_ms": max_latency_ms,
        }
        point, threshold = self.resolve(len(pixel_values), **given)
        return self.run(pixel_values, point, threshold)

    def run(self, pixel_values: np.ndarray, point: dict[str, int], threshold: float | None) -> Predictions:
        """At one operating point; with a threshold, every image leaves at the first probe whose confidence reaches it."""
        manifest, depth = self.manifest, point["depth"]
        probes = self.probe_depths(depth, threshold)
        positions = self.positions(point["tokens"])
        (input_tokens,) = self.graph("embed", pixel_values=pixel_values)
        (latents,) = self.graph("read", input_tokens=input_tokens, rope=positions["rope"])
        rows = np.arange(len(pixel_values))  # the image in each row of the batch
        outputs: dict[str, np.ndarray] = {}
        depths = np.full(len(rows), depth)
        for start, stop in self.segments(depth):
            (latents,) = self.graph(f"blocks_{point['width']}_{start}_{stop}", latents=latents, **positions)
            if stop not in probes and stop != depth:
                continue
            values = dict(zip(manifest["outputs"], self.readout(latents, input_tokens, positions["rope"])))
            leaving: np.ndarray = np.ones(len(rows), dtype=bool)
            if stop != depth:
                temperatures = manifest["exit"]["temperatures"]
                temperature = 1.0 if temperatures is None else temperatures[stop - 1]
                leaving = softmax(values["logits"] / np.float32(temperature), axis=1).max(axis=1) >= threshold
            for name, value in values.items():
                kept = outputs.setdefault(name, np.empty((len(depths), *value.shape[1:]), value.dtype))
                kept[rows[leaving]] = value[leaving]
            depths[rows[leaving]] = stop
            if leaving.all():
                break
            if leaving.any():
                latents, rows = latents[~leaving], rows[~leaving]
                input_tokens = input_tokens[~leaving] if manifest["dense"] else input_tokens
        points = [{**point, "depth": int(one)} for one in depths]
        return Predictions(outputs, points, manifest["labels"])

    def every_depth(
        self, images: Any, tokens: int | None = None, width: int | None = None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """`(depth, outputs)` after every segment of blocks: stop when time is up and keep the last ones."""
        pixel_values = self.preprocess(images)
        off = dict.fromkeys((*BUDGETS, "exit_threshold"), False)
        point, _ = self.resolve(
            len(pixel_values), tokens=tokens, width=width, depth=self.manifest["depths"][-1], **off
        )
        positions = self.positions(point["tokens"])
        (input_tokens,) = self.graph("embed", pixel_values=pixel_values)
        (latents,) = self.graph("read", input_tokens=input_tokens, rope=positions["rope"])
        for start, stop in self.segments(point["depth"]):
            (latents,) = self.graph(f"blocks_{point['width']}_{start}_{stop}", latents=latents, **positions)
            yield stop, dict(zip(self.manifest["outputs"], self.readout(latents, input_tokens, positions["rope"])))

    def readout(self, latents: np.ndarray, input_tokens: np.ndarray, rope: np.ndarray) -> list[np.ndarray]:
        more = {"input_tokens": input_tokens} if self.manifest["dense"] else {}
        return self.graph("readout", latents=latents, rope=rope, **more)

    def graph(self, name: str, **arrays: np.ndarray) -> list[np.ndarray]:
        if name not in self.loaded:
            self.loaded[name] = self.load(self.manifest["graphs"][name])
        return self.loaded[name](arrays)

    def segments(self, depth: int) -> list[tuple[int, int]]:
        stops = [stop for stop in self.manifest["depths"] if stop <= depth]
        return list(zip([0, *stops], stops))

    def positions(self, tokens: int) -> dict[str, np.ndarray]:
        """
        Cosines and sines of the latents' positions, (tokens, head_size / 2, 2), and what is added to their scores for one
        another, (tokens, tokens).
        """
        network = self.manifest["network"]
        channels = np.arange(0, network["head_size"], 2, dtype=np.float32)
        frequencies = np.float32(network["rope_theta"]) ** (-channels / np.float32(network["head_size"]))
        if tokens > network["max_latent_tokens"]:
            frequencies = frequencies / np.float32(tokens / network["max_latent_tokens"])
        angles = np.arange(tokens, dtype=np.float32)[:, None] * frequencies
        mask: np.ndarray = np.zeros((tokens, tokens), dtype=np.float32)
        if network["attention"] == "block":
            start = 0
            for stop in [count for count in network["token_granularities"] if count < tokens]:
                mask[start:stop, stop:] = HIDDEN
                start = stop
        return {"rope": np.stack((np.cos(angles), np.sin(angles)), axis=-1), "block_mask": mask}

    # ----------------------------------------------------------------------------------------------- where a call runs

    def probe_depths(self, depth: int, threshold: float | None) -> list[int]:
        exits = self.manifest["exit"]
        return [] if threshold is None else list(range(exits["after"], depth, exits["every"]))

    def resolve(self, batch_size: int = 1, **given: Any) -> tuple[dict[str, int], float | None]:
        """The operating point of a call, and its exit threshold."""
        manifest = self.manifest
        given = {name: value for name, value in given.items() if value is not None}
        chosen = {**manifest["defaults"], **given}
        largest = {axis: manifest["largest"][axis] for axis in AXES}
        values = {**largest, **{name: value for name, value in chosen.items() if value is not False}}
        check_count("tokens", values["tokens"])
        for axis, allowed in (("width", manifest["widths"]), ("depth", manifest["depths"])):
            if values[axis] not in allowed:
                raise ValueError(f"`{axis}` must be one of {allowed}, which the bundle has, got {values[axis]!r}.")
        threshold = values.get("exit_threshold")
        if threshold is not None:
            if manifest["exit"] is None:
                raise ValueError(f"`exit_threshold` needs a bundle of a classifier, got {threshold}.")
            check_number("exit_threshold", threshold, 0, 1)
        for name in BUDGETS:
            if name in values:
                check_number(name, values[name], 0)

        # A point that the call spells out wins over a saved budget.
        spelled_out = all(axis in given for axis in AXES)
        budgets = {name: values[name] for name in BUDGETS if name in values and (name in given or not spelled_out)}
        fixed = {axis: values[axis] for axis in AXES if chosen.get(axis) is not None}
        if not budgets:
            return {axis: int(values[axis]) for axis in AXES}, threshold
        points = [point for point in manifest["points"] if all(point[axis] == at for axis, at in fixed.items())]
        if not points:
            raise ValueError(
                f"{' and '.join(budgets)} need an operating point of the manifest, it has none with {fixed}."
            )

        def cost(name: str, point: dict[str, Any]) -> float:
            if name == "max_latency_ms":
                return self.milliseconds(point, threshold, batch_size)
            probes = len(self.probe_depths(point["depth"], threshold))
            return point["gflops"] + probes * (manifest["exit"]["gflops"][str(point["tokens"])] if probes else 0)

        for point in points:  # best first
            if all(cost(name, point) <= budget for name, budget in budgets.items()):
                return {axis: point[axis] for axis in AXES}, threshold
        for name, budget in budgets.items():
            cheapest = min(cost(name, point) for point in points)
            if cheapest > budget:
                raise ValueError(
                    f"`{name}` must be at least {cheapest:.4g}, the cost of the cheapest operating point, got {budget:g}."
                )
        raise ValueError(f"No operating point keeps within {budgets} at once.")

    def milliseconds(self, point: dict[str, int], threshold: float | None = None, batch_size: int = 1) -> float:
        """Of a call in which no image exits early, by the profile of this machine, which is measured when first needed."""
        times = (self.profiles.get(batch_size) or self.profile(batch_size))["graphs"]
        tokens, width, depth = (point[axis] for axis in AXES)
        readouts = 1 + len(self.probe_depths(depth, threshold))
        return (
            times["embed"]
            + times[f"read {tokens}"]
            + depth * times[f"block {width} {tokens}"]
            + readouts * times[f"readout {tokens}"]
        )

    def profile(self, batch_size: int = 1, repeats: int = 5) -> dict[str, Any]:
        """
        Measure what the operating points take on this machine: median milliseconds of every graph, in turns. All blocks of a
        width take the same time, so the first segment stands for the others. Kept for calls with `max_latency_ms`.
        """
        check_count("batch_size", batch_size)
        check_count("repeats", repeats)
        network, (first, *_) = self.manifest["network"], self.manifest["depths"]
        rows, columns = network["image_size"]
        random = np.random.default_rng(0)
        pixel_values = random.standard_normal((batch_size, network["num_channels"], rows, columns), dtype=np.float32)
        (input_tokens,) = self.graph("embed", pixel_values=pixel_values)
        runs: dict[str, tuple[Callable, dict[str, Any], int]] = {}
        runs["embed"] = (self.graph, {"name": "embed", "pixel_values": pixel_values}, 1)
        for tokens in network["token_granularities"]:
            positions = self.positions(tokens)
            (latents,) = self.graph("read", input_tokens=input_tokens, rope=positions["rope"])
            runs[f"read {tokens}"] = (
                self.graph,
                {"name": "read", "input_tokens": input_tokens, "rope": positions["rope"]},
                1,
            )
            arguments: dict[str, Any] = {"latents": latents, "input_tokens": input_tokens, "rope": positions["rope"]}
            runs[f"readout {tokens}"] = (self.readout, arguments, 1)
            for width in self.manifest["widths"]:
                arguments = {"name": f"blocks_{width}_0_{first}", "latents": latents, **positions}
                runs[f"block {width} {tokens}"] = (self.graph, arguments, first)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(1 + repeats):
            for name, (run, arguments, blocks) in runs.items():
                start = time.perf_counter()
                run(**arguments)
                if round_ > 0:  # the first call is slower
                    times[name].append(1e3 * (time.perf_counter() - start) / blocks)
        graphs = {name: statistics.median(values) for name, values in times.items()}
        self.profiles[batch_size] = {"graphs": graphs}
        points = [{**point, "ms": self.milliseconds(point, None, batch_size)} for point in self.manifest["points"]]
        self.profiles[batch_size]["points"] = points
        return self.profiles[batch_size]

    # ----------------------------------------------------------------------------------------------------------- images

    def preprocess(self, images: Any) -> np.ndarray:
        """Images to pixel values, (images, channels, height, width), as the checkpoint's processor does it."""
        network = self.manifest["network"]
        if isinstance(images, np.ndarray) and images.ndim == 4:
            shape = (network["num_channels"], *network["image_size"])
            if images.shape[1:] != shape or images.dtype.kind != "f":
                raise ValueError(
                    f"`images` must be floats of shape (images, {', '.join(map(str, shape))}) if they are pixel values, got "
                    f"{images.dtype} of shape {images.shape}."
                )
            return np.ascontiguousarray(images, dtype=np.float32)
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        if not images:
            raise ValueError("`images` must be at least one image, got none.")
        return np.stack([prepare(image, self.manifest["preprocessing"]) for image in images])


def check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")


def check_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    allowed = f"a number of at least {low}" if high is None else f"a number from {low} to {high}"
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not value >= low or (high is not None and value > high):
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


# --------------------------------------------------------------------------------------------------------- preprocessing


def prepare(image: Any, options: dict[str, Any]) -> np.ndarray:
    """One image to (channels, height, width), by the options of a `preprocessor_config.json`."""
    pixels = to_rgb(image) if options["do_convert_rgb"] else np.asarray(image)
    if options["do_resize"]:
        rows, columns = target_size(pixels.shape[:2], options["size"])
        # Along the width first, rounded to 8 bits, then along the height.
        for size in ((columns, pixels.shape[0]), (columns, rows)):
            pixels = np.asarray(PIL.Image.fromarray(pixels).resize(size, options["resample"]))
    if options["do_center_crop"]:
        pixels = center_crop(pixels, options["crop_size"]["height"], options["crop_size"]["width"])
    values: np.ndarray = pixels.astype(np.float32)
    if options["do_rescale"]:
        values = (pixels.astype(np.float64) * options["rescale_factor"]).astype(np.float32)
    if options["do_normalize"]:
        values = (values - np.float32(options["image_mean"])) / np.float32(options["image_std"])
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def to_rgb(image: Any) -> np.ndarray:
    """An image, upright, as 8-bit RGB (height, width, 3), whatever its mode; white shows through where it is transparent."""
    if isinstance(image, np.ndarray):
        if image.ndim not in (2, 3) or image.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"`images` must be 8- or 16-bit arrays (height, width, channels), got {image.dtype} of shape {image.shape}."
            )
        if image.dtype == np.uint16:
            image = np.round(image * (255 / 65535)).astype(np.uint8)
        image = PIL.Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[2] == 1 else image)
    if not isinstance(image, PIL.Image.Image):
        raise ValueError(f"`images` must be PIL images or arrays, got {type(image).__name__}.")
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # I;16, I, F: more than 8 bits
        image = PIL.Image.fromarray(to_8_bits(np.asarray(image), image.mode))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.asarray(image.convert("RGB"))


def to_8_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Scaled to 0..255. Modes I and F do not say how bright white is: the first of these that no pixel exceeds."""
    whites = {"I": (255, 65535), "F": (1, 255, 65535)}.get(mode, (65535,))
    if not 0 <= values.min() <= values.max() <= 65535:
        raise ValueError(
            f"Images of mode {mode} must have values from 0 to 65535, got {values.min()} to {values.max()}."
        )
    white = next(white for white in whites if values.max() <= white)
    return np.round(values * (255 / white)).astype(np.uint8)


def target_size(sides: Sequence[int], size: dict[str, int]) -> tuple[int, int]:
    """(height, width) after resizing: both given, or the shorter one, in proportion."""
    if "shortest_edge" not in size:
        return size["height"], size["width"]
    rows, columns = sides
    short = size["shortest_edge"]
    long = int(short * max(rows, columns) / min(rows, columns))
    return (long, short) if columns <= rows else (short, long)


def center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(height, width, channels); black where the image is smaller."""
    for axis, size in enumerate((height, width)):
        side = pixels.shape[axis]
        if side < size:
            before = -((side - size) // 2)
            padding = [(0, 0)] * 3
            padding[axis] = (before, size - side - before)
            pixels = np.pad(pixels, padding)
        else:
            start = (side - size) // 2
            pixels = pixels[start : start + size] if axis == 0 else pixels[:, start : start + size]
    return pixels


# -------------------------------------------------------------------------------------------------------------- runtimes


def onnxruntime_loader(folder: Path, threads: int | None) -> Callable[[str], Callable]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    # Many graphs take turns: threads of one must not spin while another works.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def load(name: str) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
        session = onnxruntime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])
        inputs = {one.name for one in session.get_inputs()}
        return lambda arrays: session.run(None, {key: value for key, value in arrays.items() if key in inputs})

    return load


def openvino_loader(folder: Path, threads: int | None) -> Callable[[str], Callable]:
    import openvino

    core = openvino.Core()
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }  # else bfloat16 where the CPU has it
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads

    def load(name: str) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
        compiled = core.compile_model(core.read_model(folder / name), "CPU", options)
        request, inputs = compiled.create_infer_request(), {one.get_any_name() for one in compiled.inputs}

        def run(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
            results = request.infer({key: value for key, value in arrays.items() if key in inputs})
            return [np.array(results[output]) for output in compiled.outputs]

        return run

    return load


RUNTIMES = {"onnxruntime": onnxruntime_loader, "openvino": openvino_loader}
