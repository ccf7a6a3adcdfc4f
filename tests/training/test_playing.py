"""Videos: that they open, that their pictures differ, and that every kind of environment can be drawn."""

import subprocess

import numpy as np
import pytest
from PIL import Image, ImageSequence

import envs
import fdg
from envs.rendering import Episode, frames
from fdg.errors import FdgError
from fdg.play import main as play_main
from fdg.training import playing
from tests.training.trained import fitted, small


def pictures(path):
    with Image.open(path) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def film(tmp_path, name, algorithm=None, **settings):
    """A gif of an untrained agent."""
    import jax

    algorithm = small(env=name) if algorithm is None else algorithm
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 0)
    return pictures(run.play(tmp_path / "video.gif", **{"max_steps": 6, **settings}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("runs") / "a2c", small("a2c", hidden=(8,)), iterations=1)


def test_a_gif_of_episodes_side_by_side(run, capsys):
    out = run.path / "video.gif"
    assert play_main([str(run.path), "--episodes", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    shown = pictures(out)
    # As long as the longer of the two episodes that the same seed plays.
    import jax

    played = playing.play_episodes(run.algorithm, run.state, jax.random.key(3), 2, True, 1000)
    assert all(episode.finished for episode in played)
    assert len(shown) == max(len(episode.reward) for episode in played)
    assert np.abs(shown[0].astype(int) - shown[5]).max() > 50
    height, width, _ = shown[0].shape
    assert width > 2 * height  # 600 x 400 each
    assert play_main([str(run.path), "--out", "video.avi"]) == 2
    assert "the ending of a video is one of .mp4, .gif, .html" in capsys.readouterr().err


def test_an_mp4(run, tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    out = run.play(tmp_path / "video.mp4", max_steps=8, seed=1)
    said = subprocess.run(
        [ffmpeg, "-i", str(out), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True
    )
    shown = np.frombuffer(said.stdout, np.uint8).reshape(-1, 418, 600, 3)
    assert len(shown) == 8 and np.abs(shown[0].astype(int) - shown[-1]).max() > 50


def test_a_page(run, tmp_path):
    text = run.play(tmp_path / "video.html", max_steps=3).read_text()
    assert "data:image/gif;base64," in text and "<title>CartPole-v1" in text


@pytest.mark.parametrize(
    "name", ["Breakout-MinAtar", "Catch-bsuite", "FourRooms-misc", "PointRobot-misc", "Acrobot-v1"]
)
def test_gymnaxs_own_renderers(tmp_path, name):
    shown = film(tmp_path, name, greedy=False, seed=1)
    assert 2 <= len(shown) <= 6 and (shown[0][30:] != shown[-1][30:]).any()


@pytest.mark.parametrize("name", ["probe:memory", "probe:masked", "MemoryChain-bsuite"])
def test_what_has_no_renderer_shows_what_is_seen(tmp_path, name):
    shown = film(tmp_path, name)
    assert shown[0].shape[0] > 300 and shown[0].std() > 5


def test_gymnasium_draws_itself(tmp_path):
    pytest.importorskip("pygame")
    env = envs.make("gymnasium:CartPole-v1")
    acted = []

    def act(observation, step):
        acted.append(observation)
        return np.int32(step % 2)

    (episode,) = env.source.record(act, 1, 8, 5)
    shown = list(frames(env, episode))
    assert len(shown) == len(acted) == len(episode.reward) == 8 and not episode.finished
    assert shown[0].shape == (400, 600, 3) and (shown[0] != shown[-1]).any()
    assert episode.observation.shape == (8, 4)


def test_an_environment_that_draws_itself():
    class Single:
        def render(self, state):
            return np.full((4, 6), state / 10)

    class Env:
        name, single = "mine", Single()

    episode = Episode([1, 2], np.zeros((2, 1)), np.zeros(2), np.ones(2), True)
    first, second = frames(Env(), episode)
    assert (
        first.shape == (4, 6, 3) and first.dtype == np.uint8 and first[0, 0, 0] == 25 and (second == 51).all()
    )

    class Broken(Single):
        def render(self, state):
            raise OSError("no display")

    Env.single = Broken()
    with pytest.raises(FdgError, match="mine cannot be rendered: OSError: no display"):
        next(frames(Env(), episode))


@pytest.mark.parametrize("settings", [{"episodes": 0}, {"fps": 0}, {"max_steps": 1.5}])
def test_errors_of_one_line(run, tmp_path, settings):
    with pytest.raises(FdgError, match=f"{next(iter(settings))}=.*: give an integer"):
        run.play(tmp_path / "video.gif", **settings)


def test_what_answers_in_text_is_not_told_to_act():
    class Speaker:
        def examples(self, state, key, count):
            return ()

    with pytest.raises(FdgError, match="Speaker cannot play: it generates text"):
        fdg.Run(Speaker(), {}, 0).play("video.gif")


def test_who_draws_itself_starts_from_the_seed(monkeypatch):
    """Another seed, another start; and the captions say how actions are chosen."""
    import jax

    class Source:
        def record(self, act, episodes, limit, seed):
            return episodes, limit, seed

    class Algorithm:
        class env:
            source, max_episode_steps = Source(), None

    monkeypatch.setattr(playing, "Acting", lambda *words: words)
    seeds = {playing.play_episodes(Algorithm, {}, jax.random.key(i), 2, True, 9) for i in range(3)}
    assert len(seeds) == 3 and {one[:2] for one in seeds} == {(2, 9)}
    assert max(seed for *_, seed in seeds) > 2**20


def test_the_caption(monkeypatch):
    from PIL import ImageDraw

    class Single:
        def render(self, state):
            return np.zeros((4, 6, 3), np.uint8)

    class Env:
        name, single = "mine", Single()

    said = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, fill: said.append(text))
    episode = Episode([0, 0], np.zeros((2, 1)), np.zeros(2), np.array([1.5, 2.0]), True)
    for greedy in (True, False):
        assert len(list(playing._joint_frames(Env(), [episode], greedy))) == 2
    words = ["greedy, step 1, return 1.5", "greedy, step 2, return 3.5"]
    assert said == [*words, *(word.replace("greedy", "sampled") for word in words)]
