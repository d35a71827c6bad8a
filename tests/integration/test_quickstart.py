"""The quickstart of the README, and real embeddings beside the greedy competitors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamask_pl.cli import main
from datamask_pl.evidence.baselines.greedy import greedy_disf, greedy_pairwise, lazy_greedy_facility_location
from tests.support.fits import ROOT, fit, manifest, parts, run_folder

DICTIONARY = ROOT / "tests/fixtures/dictionary/features.parquet"


def test_sample_embed_and_fit_give_a_mask_that_beats_random_and_top_quality(workplace):
    pytest.importorskip("sklearn")
    main(["sample", "--output", "quickstart-data/text.parquet", "--num_samples", "1500"])
    embedding = ("--num_dimensions", "48", "--output", "quickstart-data/features.parquet")
    main(["embed", "--source", "quickstart-data/text.parquet", *embedding])
    fit("--config", str(ROOT / "configs/quickstart.yaml"))
    run = run_folder(name="quickstart")
    (block,) = manifest(run)["blocks"].values()
    assert block["num_selected"] == 150
    assert block["mask"]["f"] > block["top_quality"]["f"] > block["random"]["f"]
    assert block["mask"]["terms"]["quality"] > block["random"]["terms"]["quality"]
    assert block["mask"]["terms"]["facility_location"] > block["random"]["terms"]["facility_location"]
    (part,) = parts(run)
    ids = pq.read_table("quickstart-data/text.parquet")["chunk_id"]
    assert part["id"].to_pylist() == ids.to_pylist()


@pytest.fixture(scope="module")
def embeddings():
    """3,000 real embeddings, as a file and as unit float64 features with rank-scaled quality."""
    table = pq.read_table(DICTIONARY)
    features_ND = np.stack([row.values.to_numpy(zero_copy_only=False) for row in table["feature_arr"]])
    features_ND = torch.from_numpy(features_ND.astype(np.float64))
    quality_N = np.asarray(table["quality_score"].combine_chunks().cast(pa.float64()))
    ranks_N = np.array([(quality_N < value).sum() + ((quality_N == value).sum() - 1) / 2 for value in quality_N])
    return (
        str(DICTIONARY),
        features_ND / features_ND.norm(dim=1, keepdim=True),
        torch.from_numpy(ranks_N / (len(ranks_N) - 1)),
    )


@pytest.mark.parametrize(
    ("diversity", "greedy"),
    [
        ("facility_location", lazy_greedy_facility_location),
        ("pairwise", greedy_pairwise),
        ("disf", greedy_disf),
    ],
)
def test_on_real_embeddings_the_mask_is_worth_what_greedys_is_or_more(workplace, embeddings, diversity, greedy):
    path, features_ND, quality_N = embeddings
    raw = ("--model.calibrate", "false", "--model.quality_weight", "0.3", "--model.select_ratio", "0.1")
    fit("--data.path", path, *raw, "--model.diversity", diversity)
    (block,) = manifest(run_folder())["blocks"].values()
    mask_N = greedy(features_ND, quality_N, num_selected=300, quality_weight=0.3)
    # exchanges end where they would gain less than the rounding of float32 products
    assert block["mask"]["f"] >= f_of(mask_N, diversity, features_ND, quality_N, quality_weight=0.3) - 1e-9
    # and the manifest tells the truth
    own_N = torch.tensor(parts(run_folder())[0]["selected"].to_numpy())
    assert block["mask"]["f"] == pytest.approx(
        f_of(own_N, diversity, features_ND, quality_N, quality_weight=0.3), abs=1e-5
    )


def f_of(mask_N, diversity, features_ND, quality_N, *, quality_weight):
    """The raw objective by its formula, in float64 products that 3,000 samples allow."""
    kept_KD = features_ND[mask_N]
    k = len(kept_KD)
    if diversity == "facility_location":
        value = (features_ND @ kept_KD.T).clamp(min=0).amax(1).mean()
    elif diversity == "pairwise":
        value = -((kept_KD @ kept_KD.T).sum() - k) / (k * (k - 1))
    else:
        z_KD = kept_KD - features_ND.mean(0)
        value = -((z_KD.T @ z_KD / k) ** 2).sum()
    return float(quality_weight * quality_N[mask_N].mean() + (1 - quality_weight) * value)
