"""
    make demo

One checkpoint, 200 photographs, many budgets: what AdaPerceiver gets right at each operating point, what that costs, and how
long it takes on this machine. Nothing is downloaded. The figure goes to `--output`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from PIL import Image
from tqdm import tqdm
from transformers import HfArgumentParser, pipeline

from adaperceiver import AdaPerceiverImageClassificationPipeline
from adaperceiver.adaptive_adaperceiver import interleaved


ROOT = Path(__file__).parents[1]
CALLS = [
    {},
    {"tokens": 16},
    {"tokens": 4},
    {"tokens": 1},
    {"width": 32},
    {"width": 8},
    {"depth": 4},
    {"depth": 2},
    {"tokens": 4, "depth": 3},
    {"tokens": 1, "width": 8, "depth": 1},
    {"exit_threshold": 0.95},
    {"exit_threshold": 0.8},
    {"max_gflops": 0.08},
]
BUDGETS = [{}, {"tokens": 4}, {"depth": 2}, {"exit_threshold": 0.8}]  # for the single images
BATCH = 50


@dataclass
class Arguments:
    checkpoint: str = field(
        default=str(ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"), metadata={"help": "An image classifier."}
    )
    samples: str = field(
        default=str(ROOT / "examples" / "cifar10_samples.parquet"), metadata={"help": "Columns image and label."}
    )
    output: str = field(default="runs/demo", metadata={"help": "Folder for the figure."})


@dataclass
class Result:
    """What the pipeline said at one operating point."""

    call: dict
    answers: list[dict]  # label and score, one an image
    accuracy: float
    gflops: float  # mean over the images: with early exit each has its own
    milliseconds: float = float("nan")  # an image, in batches

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.call.items()) or "the full model"


def classify(classifier: pipeline, images: list[Image.Image], labels: list[str], call: dict) -> Result:
    found = classifier(images, **call, top_k=1, report=True, batch_size=BATCH)
    answers = [one["result"][0] for one in found]
    right = [answer["label"] == label for answer, label in zip(answers, labels)]
    gflops = [one["report"]["gflops"] for one in found]
    return Result(call, answers, sum(right) / len(right), sum(gflops) / len(gflops))


def measure(classifier: pipeline, images: list[Image.Image], results: Sequence[Result]) -> None:
    """Milliseconds an image of the model alone, in batches; the operating points take turns."""
    pixel_values = classifier.image_processor(images, return_tensors="pt").pixel_values
    runs = {
        result.name: lambda call=result.call: [classifier.model(part, **call) for part in pixel_values.split(BATCH)]
        for result in results
    }
    times = interleaved(runs, repeats=5, name="milliseconds")
    for result in results:
        result.milliseconds = times[result.name] / len(images)


def print_table(results: Sequence[Result]) -> None:
    print(f"{'classify(images, ...)':34} {'right':>7} {'GFLOPs':>8} {'ms an image':>12}")
    for result in results:
        print(f"{result.name:34} {result.accuracy:7.1%} {result.gflops:8.3f} {result.milliseconds:12.2f}")


def print_images(classifier: pipeline, images: list[Image.Image], labels: list[str]) -> None:
    """One image at a time, as a user would ask."""
    names = [", ".join(f"{key}={value}" for key, value in call.items()) or "the full model" for call in BUDGETS]
    print(f"\n{'image':12}" + "".join(f"{name:>22}" for name in names))
    for image, label in zip(images, labels):
        best = [classifier(image, **call, top_k=1)[0] for call in BUDGETS]
        print(f"{label:12}" + "".join(f"{one['label'] + ' ' + format(one['score'], '.0%'):>22}" for one in best))


def draw(results: Sequence[Result], images: int, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for result in results:
        early = "exit_threshold" in result.call
        axes.scatter(result.gflops, 100 * result.accuracy, color="#c0504d" if early else "#3b6fb6", zorder=3)
        axes.annotate(
            result.name,
            (result.gflops, 100 * result.accuracy),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
            rotation=30,  # points that cost about the same stay readable
        )
    axes.set_xlabel("GFLOPs an image (mean)")
    axes.set_ylabel(f"right, % of {images} images")
    axes.set_title("One checkpoint at many operating points (red: early exit)")
    axes.margins(x=0.2, y=0.2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    samples = Dataset.from_parquet(arguments.samples)
    images = [image.convert("RGB") for image in samples["image"]]
    labels = [samples.features["label"].int2str(label) for label in samples["label"]]
    classifier = pipeline(
        "image-classification",
        model=arguments.checkpoint,
        pipeline_class=AdaPerceiverImageClassificationPipeline,
        device="cpu",
    )
    config = classifier.model.config
    print(
        f"{Path(arguments.checkpoint).name}: {classifier.model.num_parameters() / 1e6:.1f} M parameters, trained for tokens "
        f"{config.token_granularities}, widths {config.widths}, depths 1 to {config.num_hidden_layers}.\n"
        f"{len(images)} images it was not trained on:\n"
    )
    results = [classify(classifier, images, labels, call) for call in tqdm(CALLS, "operating points", leave=False)]
    measure(classifier, images, results)
    print_table(results)
    noise = 100 * (results[0].accuracy * (1 - results[0].accuracy) / len(images)) ** 0.5
    print(f"\n{len(images)} images tell accuracies apart to about {noise:.1f} points.")
    step = max(len(images) // 6, 1)
    print_images(classifier, images[::step], labels[::step])
    figure = Path(arguments.output) / "accuracy.png"
    draw(results, len(images), figure)
    print(f"\nAccuracy against compute is drawn in {figure}.")


if __name__ == "__main__":
    main()
