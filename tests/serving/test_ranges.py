"""Ranges of settings: what cannot be drawn with is refused in one line before an answer begins."""

import math

import pytest
from transformers import GenerationConfig

from torch_moe_mps.serving.engine.ranges import check_seed, check_settings

OWN = GenerationConfig(eos_token_id=[700, 5])
WRONG = [
    ({"top_k": 10**30}, "top_k must be an integer from 0 to 9223372036854775807, got 1000000000000"),
    ({"top_k": -1}, "top_k must be an integer from 0 to"),
    ({"top_k": 2.0}, "top_k must be an integer from 0 to .*, got 2.0"),
    ({"top_k": True}, "got True"),
    ({"top_p": math.nan}, "top_p must be a number from 0 to 1, got nan"),
    ({"min_p": -0.1}, "min_p must be a number from 0 to 1"),
    ({"temperature": 1e300}, r"temperature must be a number above 0 and at most 1e\+06, got 1e\+300"),
    ({"temperature": math.inf}, "temperature must be .*, got inf"),
    ({"temperature": 10**400}, "temperature must be .*, got 1000"),
    ({"temperature": 0.0}, "temperature must be .*, got 0.0"),
    ({"temperature": "1"}, "temperature must be .*, got '1'"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
    ({"max_time": math.nan}, "max_time must be a number above 0"),
    ({"eos_token_id": [500, -7]}, "eos_token_id must be of tokens from 0 to 98, at most 64, got .500, -7."),
    ({"eos_token_id": 2.5}, "eos_token_id must be of tokens from 0 to 98, at most 64, got 2.5"),
    ({"eos_token_id": [5] * 65}, "eos_token_id must be of tokens from 0 to 98, at most 64, got"),
    ({"suppress_tokens": [5] * 1025}, "suppress_tokens must be a list of tokens .*, at most 1024, got"),
    ({"bad_words_ids": [[5]] * 65}, "bad_words_ids must be a list of at most 64 lists of tokens"),
    ({"bad_words_ids": [[5] * 65]}, "bad_words_ids must be a list .*, each of 1 to 64, got"),
    ({"num_beams": 10**9}, "num_beams must be 1 "),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_setting_out_of_its_range_is_one_line(settings, message):
    config = GenerationConfig()
    for name, value in {"do_sample": True, **settings}.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message) as raised:
        check_settings(config, OWN, 99)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1, "repetition_penalty": 1},
        {"do_sample": True, "top_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0},
        {"do_sample": False, "temperature": 0.0, "top_k": -1},
        {"eos_token_id": [700, 5]},
        {"eos_token_id": 98},
        {"max_new_tokens": 10**6},
    ],
)
def test_neutral_settings_and_a_models_own_are_taken(settings):
    check_settings(GenerationConfig(**settings), OWN, 99)


@pytest.mark.parametrize("seed", [2.5, 1 << 63, -(1 << 63) - 1, "7", True])
def test_a_seed_that_no_generator_takes(seed):
    with pytest.raises(ValueError, match="seed must be an integer from -9223372036854775808 to"):
        check_seed(seed)
