"""Students before training: some of the teacher's layers, a named size, a model folder, or a classic model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import floor

from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, assign, config_of, create, load, read_config
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError, ModelError, did_you_mean
from heedful.families import DEFAULT_FAMILIES, FAMILIES
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import (
    Learned,
    MaskedTokens,
    ModelConfig,
    SentenceEmbedding,
    Shaw,
    StackConfig,
    TransformerXl,
)
from heedful.model.initialise import skip_init
from heedful.objectives.distillation.objective import DistillationLosses, HiddenStateLoss, RelationLoss
from heedful.runs.distil.settings import (
    ClassicStudent,
    FolderStudent,
    LayersStudent,
    LossSettings,
    RelationsSettings,
    SizeStudent,
    StatesSettings,
    StaticStudent,
    StudentSettings,
)
from heedful.runs.distil.static import static_student
from heedful.runs.finetune.build import evenly_spaced
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import ClassicInit
from heedful.runs.pretrain.build import config_of_size, with_dropout
from heedful.runs.pretrain.settings import ModelSettings, PretrainSettings
from heedful.tasks.answering import require_tokenizer

MAX_LENGTH = 512  # tokens of a student with random weights, unless the teacher reads fewer


def build_student(
    asked: StudentSettings,
    teacher: ModelBundle,
    texts: Sequence[str],
    *,
    longest: int | None,
    seed: int,
    log: Callable[[str], None],
) -> ModelBundle:
    """Make or load the student; one of the teacher's layers has the teacher's head, too.

    Raises:
        HeedfulError: If the teacher cannot have such a student.
    """
    match asked:
        case LayersStudent():
            return student_from_layers(teacher, asked)
        case SizeStudent():
            return student_of_size(teacher, asked, longest, seed)
        case FolderStudent(model=model, revision=revision):
            return load(model, revision=revision or None)
        case StaticStudent():
            return static_student(teacher, asked, texts, log)
        case ClassicStudent(reader=reader, words=words, skipgram_steps=steps):
            settings = ClassicInit(reader=reader, words=words, skipgram_steps=steps)
            try:
                return classic_model(settings, list(evenly_spaced(texts, len(texts))), seed, log, all_texts=texts)
            except HeedfulError as error:  # it names settings of fine-tuning
                message = str(error).replace("init.", "student.")
                raise HeedfulError(message) from None


def single_stack(config: ModelConfig) -> StackConfig | None:
    """The stack of a model that has exactly one, else None."""
    if type(config) is ClassicConfig or (config.encoder is None) == (config.decoder is None):
        return None
    return config.encoder or config.decoder


def require_single_stack(model: ModelBundle) -> StackConfig:
    """Return the stack of a model.

    Raises:
        HeedfulError: If it does not have exactly one.
    """
    stack = single_stack(model.config.model)
    if stack is None:
        raise HeedfulError(
            f"{model.source} ({model.config.family}) does not have a single stack of Transformer layers, which "
            "students of some layers and losses of states and relations need: choose a student of a size or in a "
            'folder, and the loss "logits"'
        )
    return stack


# -- some of the teacher's layers ---------------------------------------------------------------------------------


def evenly_spread(layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced layers, the first and the last among them.

    >>> evenly_spread(12, 6), evenly_spread(6, 3), evenly_spread(4, 1)
    ((0, 2, 4, 7, 9, 11), (0, 3, 5), (0,))
    """
    return tuple(floor(n * (layers - 1) / max(1, count - 1) + 0.5) for n in range(count))


def _near(stack: StackConfig, layer: int) -> bool:
    """Whether a layer has local attention, which its number decides."""
    return stack.window_of(layer) is not None


def _fitting(stack: StackConfig, wanted: Sequence[int]) -> tuple[int, ...]:
    """The layers nearest to `wanted` whose attention is as local as that of the position which they take."""
    period = (stack.global_every or 1) if stack.window is not None else 1
    uneven = stack.global_layers is not None
    room = 0 if uneven else (stack.layers - len(wanted)) // period * period  # by how far all may move up, as they are
    chosen: list[int] = []
    for place, layer in enumerate(wanted):
        first = chosen[-1] + 1 if chosen else 0
        alike = [
            candidate for candidate in range(first, place + room + 1) if _near(stack, candidate) == _near(stack, place)
        ]
        chosen.append(min(alike, key=lambda candidate: (abs(candidate - layer), candidate)))
    return tuple(chosen)


def student_from_layers(teacher: ModelBundle, settings: LayersStudent) -> ModelBundle:
    """Copy layers of the teacher into a student, of another family if one is named.

    Raises:
        HeedfulError: If there are no such layers, or they cannot be in this order or family.
    """
    model, stack = teacher.config.model, require_single_stack(teacher)
    if settings.layers > stack.layers:
        raise HeedfulError(
            f"layers is {settings.layers}, but {teacher.source} has {stack.layers}: give a number from 1 to "
            f"{stack.layers}"
        )
    layers = settings.teacher_layers or _fitting(stack, evenly_spread(stack.layers, settings.layers))
    if wrong := [number for number in layers if not 0 <= number < stack.layers]:
        raise HeedfulError(f"teacher_layers names the layers {wrong}, but {teacher.source} has {stack.layers}, from 0")
    if strangers := [(taken, n) for n, taken in enumerate(layers) if _near(stack, n) != _near(stack, taken)]:
        raise HeedfulError(
            "teacher_layers puts layer {} in the place of layer {}, but one has local attention and the other global: "
            "name layers of one kind, or leave teacher_layers out".format(*strangers[0])
        )
    shared = stack.blocks is not None and stack.blocks < stack.layers
    blocks = list(layers) if not shared else list(range(min(stack.blocks or 1, len(layers))))
    part = "encoder" if model.encoder is not None else "decoder"
    small = replace(stack, layers=len(layers), blocks=len(blocks) if shared else None)
    small_model = replace(model, encoder=small) if part == "encoder" else replace(model, decoder=small)
    config = BundleConfig(family=teacher.config.family, model=small_model, head=teacher.config.head)
    if settings.family not in ("", config.family):
        config = _in_family(settings.family, config)
    with skip_init():
        student = ModelBundle(config, teacher.tokenizer, teacher.source)
    tensors_of_teacher = teacher.named_tensors()
    if config.head is None and isinstance(teacher.config.head, MaskedTokens):  # of another family, whose head is alike
        assign(student, _tensors(student, tensors_of_teacher, part, blocks, stack), "cpu")
        student = with_head(student, "masked_lm")
    tensors = _tensors(student, tensors_of_teacher, part, blocks, stack)
    if config.model.embedding.types == 0 < model.embedding.types and "embedding.positions.weight" in tensors:
        tensors["embedding.positions.weight"] += tensors_of_teacher["embedding.types.weight"].detach()[0]
    assign(student, tensors, "cpu")
    student.thresholds, student.text_suffix = dict(teacher.thresholds), teacher.text_suffix
    student.source = f"layers {' '.join(map(str, layers))} of {teacher.source}"
    return student.eval()


def _tensors(
    student: ModelBundle, tensors: dict[str, Tensor], part: str, blocks: Sequence[int], stack: StackConfig
) -> dict[str, Tensor]:
    """Copies of the teacher's tensors under their names in the student.

    Raises:
        ModelError: If a layer cannot be in the position of another one.
    """
    names = {name: _teacher_name(name, part, blocks, stack) for name in student.named_tensors()}
    copied = {name for name in tensors if any(name.startswith(f"{part}.blocks.{block}.") for block in blocks)}
    wanted = {name for name in names.values() if name.startswith(f"{part}.blocks.")}
    if different := sorted(copied ^ wanted):
        raise ModelError(
            f"the layers {' '.join(map(str, blocks))} cannot be in this order: {different[0]} would be missing "
            "or lost, since this teacher's first layer has another form: name it first and only there"
        )
    return {name: tensors[teacher_name].detach().clone() for name, teacher_name in names.items()}


def _teacher_name(name: str, part: str, blocks: Sequence[int], stack: StackConfig) -> str:
    """The name in the teacher of a tensor of the student."""
    lists = ["blocks", *(["relations"] if isinstance(stack.relation, Shaw | TransformerXl) else [])]
    components = name.split(".")
    if components[0] == part and components[1] in lists:
        components[2] = str(blocks[int(components[2])])
    return ".".join(components)


def _in_family(family: str, config: BundleConfig) -> BundleConfig:
    """The config in another family, with its dropout, and without token types if it has none.

    Raises:
        HeedfulError: If the family computes the layers in another way.
    """
    if family not in FAMILIES:
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, list(FAMILIES))}: {", ".join(FAMILIES)}')
    wanted = config.model
    if _parts(family) == (wanted.encoder is None, wanted.decoder is None):
        own = read_config(dict(FAMILIES[family].write(wanted)) | {"model_type": family}, family).model
        if own.embedding.types == 0 and isinstance(wanted.embedding.positions, Learned):
            wanted = replace(wanted, embedding=replace(wanted.embedding, types=0))
        if with_dropout(own, wanted) == wanted:
            return BundleConfig(family=family, model=own)
    raise HeedfulError(
        f"the teacher's layers are computed in another way than {family} does: leave student.family out, or take a "
        "student of a size, which begins with fresh weights"
    )


def _parts(family: str) -> tuple[bool, bool] | None:
    """Whether a family lacks an encoder, and a decoder, by its first published size; None if it has no sizes."""
    sizes = FAMILIES[family].sizes
    if not sizes:
        return None
    usual = read_config(dict(next(iter(sizes.values()))) | {"model_type": family}, family).model
    return usual.encoder is None, usual.decoder is None


# -- a size -------------------------------------------------------------------------------------------------------


def student_of_size(teacher: ModelBundle, asked: SizeStudent, longest: int | None, seed: int) -> ModelBundle:
    """Make a student with random weights and the teacher's vocabulary."""
    tokenizer = require_tokenizer(teacher)
    longest = longest or min(teacher.max_length or MAX_LENGTH, MAX_LENGTH)
    settings = PretrainSettings(
        model=ModelSettings(size=asked.size, layers=asked.layers, width=asked.width, heads=asked.heads),
        max_seq_length=longest,
    )
    family = asked.family or _like(teacher.config)
    if family not in FAMILIES or not FAMILIES[family].sizes:
        known = [name for name, of_name in FAMILIES.items() if of_name.sizes]
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, known)}: {", ".join(known)}')
    student = create(config_of_size(family, settings, tokenizer), tokenizer.limited(longest), seed=seed)
    student.source = f"a fresh model of size {asked.size}"
    return student.eval()


def _like(config: BundleConfig) -> str:
    """The teacher's family if its sizes have the same parts, else the usual family."""
    if _parts(config.family) == (config.model.encoder is None, config.model.decoder is None):
        return config.family
    return DEFAULT_FAMILIES["mlm"]


# -- what it learns of the teacher --------------------------------------------------------------------------------


def resolve_losses(settings: LossSettings, student: ModelBundle, teacher: ModelBundle) -> DistillationLosses:
    """Resolve loss settings to the layers and heads of a student and a teacher.

    Raises:
        HeedfulError: If they have no such layers, or their relations cannot be compared.
    """
    states: list[HiddenStateLoss] = []
    relations: tuple[RelationLoss, ...] = ()
    if settings.states is not None or settings.relations is not None:
        stacks = (
            require_single_stack(student),
            require_single_stack(teacher),
        )
        if settings.states is not None:
            states.append(_states(settings.states, *stacks))
        if settings.relations is not None:
            relations = _relations(settings.relations, *stacks)
    return DistillationLosses(
        kd=settings.kd_weight,
        temperature=settings.temperature,
        ranking=settings.ranking,
        label=settings.label_weight,
        states=tuple(states),
        relations=relations,
    )


def head_untrained(settings: LossSettings, student: ModelBundle, teacher: ModelBundle) -> bool:
    """Whether the student's head has random weights and no loss reaches it."""
    learns = (
        settings.kd_weight
        or settings.label_weight
        or teacher.head is None
        or not any(True for _ in teacher.head.parameters())
    )
    return not learns and student.config.head != teacher.config.head


def _states(settings: StatesSettings, student: StackConfig, teacher: StackConfig) -> HiddenStateLoss:
    pairs = settings.pairs or ((student.layers, teacher.layers),)
    if not settings.pairs and settings.layers == "spread":
        pairs = tuple((n, floor(n * teacher.layers / student.layers + 0.5)) for n in range(student.layers + 1))
    for layer, taught in pairs:
        if not (0 <= layer <= student.layers and 0 <= taught <= teacher.layers):
            raise HeedfulError(
                f"states.pairs has ({layer}, {taught}), but the student has {student.layers} layers and the teacher "
                f"{teacher.layers}: give numbers from 0, what enters the first, to these"
            )
    if settings.how == "cosine" or settings.how == "mse":
        return HiddenStateLoss(weight=settings.weight, how=settings.how, pairs=tuple(pairs))
    raise AssertionError(settings.how)


def _relations(settings: RelationsSettings, student: StackConfig, teacher: StackConfig) -> tuple[RelationLoss, ...]:
    """One relation term, or one per layer of the student, which then share the weight."""
    heads = settings.heads or teacher.heads
    if settings.layers == "spread" and settings.layer is None and settings.teacher is None:
        pairs = [(n - 1, floor(n * teacher.layers / student.layers + 0.5) - 1) for n in range(1, student.layers + 1)]
        pairs = [(layer, max(0, taught)) for layer, taught in pairs]
    else:
        pairs = [
            (
                student.layers - 1 if settings.layer is None else settings.layer,
                teacher.layers - 1 if settings.teacher is None else settings.teacher,
            )
        ]
    for who, numbers, stack in (
        ("student", [layer for layer, _ in pairs], student),
        ("teacher", [layer for _, layer in pairs], teacher),
    ):
        if wrong := [number for number in numbers if not 0 <= number < stack.layers]:
            raise HeedfulError(f"relations: layer {wrong[0]} of the {who} was named, but it has {stack.layers}, from 0")
        if stack.heads * stack.head_width % heads:
            raise HeedfulError(
                f"relations: the {who}'s {stack.heads * stack.head_width} numbers of queries and keys cannot be split "
                f"into {heads} heads: set loss.relations.heads to a number that divides both"
            )
        plain = stack.relation is None and not stack.causal and stack.window is None
        if "qk" in settings.of and not plain:
            raise HeedfulError(
                f'relations: "qk" is attention where nothing is added to the scores and all tokens see each other, and '
                f"that is not so in the {who}: use qq, kk and vv"
            )
    share = settings.weight / len(pairs)
    return tuple(
        RelationLoss(weight=share, of=tuple(settings.of), pair=pair, heads=heads, squares=settings.squares)
        for pair in pairs
    )


def sentence_vector_width(loaded: ModelBundle) -> int:
    """The width of a text's vector: the poolings of an embedding head are concatenated."""
    head, model = loaded.config.head, loaded.config.model
    return head.width(model) if isinstance(head, SentenceEmbedding) else model.width


def width_for_lr(settings: StudentSettings, teacher: ModelBundle) -> int:
    """The width by which the default learning rate is chosen: of the student's folder, or of the teacher."""
    if isinstance(settings, FolderStudent):
        return config_of(settings.model, revision=settings.revision or None).model.width
    return teacher.config.model.width
