"""
    make demo

One network, one image, many operating points: what each costs and how long it takes on this machine. The weights are
random (nothing is downloaded), so the labels mean nothing; costs and times do not depend on them.
"""

import torch
from PIL import Image

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, image_processor_for
from adaperceiver.cost_adaperceiver import milliseconds


def main() -> None:
    torch.manual_seed(0)
    # Half the paper's size in every direction but tokens.
    config = AdaPerceiverConfig(hidden_size=416, num_attention_heads=13, num_hidden_layers=10, num_labels=1000)
    model = AdaPerceiverForImageClassification(config).eval()
    processor = image_processor_for(config, "image-classification")
    image = Image.effect_mandelbrot((320, 240), (-2.0, -1.2, 1.0, 1.2), 100).convert("RGB")
    pixel_values = processor(image, return_tensors="pt").pixel_values

    print(f"AdaPerceiver with {model.num_parameters() / 1e6:.0f} M parameters, random weights, one image of 224x224")
    print(f"trained for tokens {config.token_granularities}, widths {config.widths}, depths 1 to 10\n")
    calls = [
        {},
        {"tokens": 128},
        {"tokens": 32},
        {"tokens": 50},
        {"width": 208},
        {"depth": 5},
        {"tokens": 32, "width": 208, "depth": 5},
        {"max_gflops": 6},
        {"max_gflops": 3},
        {"exit_threshold": 0.9},
    ]
    print(f"{'model(pixel_values, ...)':40} {'tokens':>6} {'width':>6} {'depth':>6} {'GFLOPs':>7} {'ms':>7}")
    for call in calls:
        point = model.operating_point(**call)
        with torch.no_grad():
            time = milliseconds(lambda: model(pixel_values, **call), repeats=5)  # noqa: B023
        name = ", ".join(f"{key}={value}" for key, value in call.items()) or "(the full model)"
        gflops = model.flops(**call)["total"] / 1e9
        print(f"{name:40} {point.tokens:6} {point.width:6} {point.depth:6} {gflops:7.2f} {time:7.1f}")


if __name__ == "__main__":
    main()
