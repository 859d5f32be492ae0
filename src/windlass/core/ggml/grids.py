"""The grids of ggml's IQ2 and IQ3 types: which combinations of magnitudes a code may stand for.

A code is an index into a grid; a row of it has 8 magnitudes (IQ2) or 4 (IQ3). The grids are part of the file format (ggml-common.h: iq2xxs_grid
to iq3s_grid) and follow no formula. Here a row is a number whose digits, lowest first, choose among the levels; numbers are 16 bits,
little-endian, in base 85.
"""

from __future__ import annotations

from base64 import b85decode
from functools import cache

LEVELS: dict[str, tuple[int, ...]] = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
LENGTHS = {"IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 4, "IQ3_S": 4}
"""Magnitudes of a row."""


@cache
def grid(name: str) -> bytes:
    """Magnitudes, row after row."""
    levels, length = LEVELS[name], LENGTHS[name]
    packed = b85decode("".join(_ROWS[name]))
    powers: list[int] = [len(levels) ** place for place in range(length)]
    numbers = [int.from_bytes(packed[at : at + 2], "little") for at in range(0, len(packed), 2)]
    return bytes([levels[number // power % len(levels)] for number in numbers for power in powers])


_ROWS: dict[str, tuple[str, ...]] = {
    "IQ2_XXS": (
        "000621ONsA2mlHI3;+@U6aW|i8UP#s9snc&DgZ73FaS0HH~>BXN&r#-Q~+84UI1(WiU5`Xq5z}-",
        "wgB1y^Z@n%`~U_42muZO5CIecAOR`?ECDhBJ^@4lMgd9zRsm!Icma9=gaMoZo&m4{&H>;7<^k#f>;dut{s9641Of^I3<4qoIs#GxiUO1Z+5+4H",
        ";sWdf^a2J05(5|m90Mu?FataTP6Jj0U;~f?ngh%O(gWTD;sfpj0t74sOayKOd<4J*!UV_!+649l5Cs$kSOta!vIVpSx&_b$;05Rf>IEDIBnDIl",
        "RtBa9s0OYEzy{6+_68CMCI^NGo(HN2+6Pz&j0lbhln9y#o(P}_rU<MEv<SEe!U)6&$_U&D?g$DA5(yRwE(taXP6<{CU<rN+gb9!dv<bus+6m+d",
        "APRB{bP9S3j0%tn!V2sP@Cy10G7C}*WD9BwZVPk^b_<#dpbNMQ(hC3#Mhun=m<+HC`V1fqN)1#ES`B&)whi(PKn_L@SPpOwjt;gC?hXtOFb^~j",
        "iVutrx(`4Q77-W`9uYDTP7!Jmb`gRR!VwA*3=$F&77`>9HWFGAdJ>!xvJ%D;*b@E{P!p&V@)P(I1QZGsI22A4b`-",
        "D_;uQ8202Npj3>G*R$`<Sv0v8|`Y8T2E(ij36",
    ),
    "IQ2_XS": (
        "000621ONsA2mlHI3;+%Q5C9SY6aW?g7yujq9snQ!A^;=+CIBb^DgZ73FaS0HH~=~TJODrdLI6epNB~j*Q~*{0SO8i8TmW7GU;ttOWB_IWYyfTm",
        "Z~$@ub^v$)egK33hyaQJkN~0pqyVM>r~s@0t^l+Ez5u`g#sJCy*Z|-",
        "F^Z@n%_yGC<`~dy{009C41_1~G4gnAW5&;we7y%jq904E!Dgi73G66&ZMgd3xN&!v*Pyto}U;$zQXaRBodI6RJm;s&vtO2kAvH{Kk<^kvd>H+K",
        "l?g8)t@&Wh(`~d<21Of^I5CR+mE&?_JI08BXKmt+%ZUS@yhyt1dpaRSS&;r^5+ydSL-",
        "~!?T<O1db=mP8l?gI1z_5%0<`U3s}00RaC4g(Ma5(5|mDg!J7E(0(FGy^sRJOf4pNCQp-",
        "U;}IeZUcM+egl95gaeiXr~}Lc&I8Z`(gW55*aO}J=mY8l?gQ`x`~w069t0o+CImPHZUlM+kOaU4!UV_!$^_a3<^=i#5Cs$kLIs8eum!ROv<0>W",
        "xCOceyam1m#0Aa;&;`~7=mq)(1O^5M3<e$sBnC7FR0e1UiUy(vrUs}6t_Hpazy|gP5(gXyJO@YzSO=5`m<OH*pa-",
        "f4zz5U^;s+cEC<s6ZObBuab_jR~j0lbhkO-",
        "0pln9mxm<XB(o(P}_rU<AAstBwIt_ZLQvIw{cya>Vw#0bg=+z8$X;0WRf<_PEr?g;n@`Un6C5(yRwCJ8PHFbOsZI0;4xNC|!kfC+*Lgb9cViV2",
        "PhkO`UzoC%@{v<bio&<WBB*a_qb>IoJKAPOi7J_<w%atd?`dJ2pRkP4UzpbEkY%nINN<_h)-",
        "77JtxW(#NwY71@)a0_+|d<%dJf(wWXnhUlIxC_1u!VAy~(hCL*Bn(yzSPWVWU<_&uatwqFjtrm-s0^+Q-",
        "VEdn3=J#|LJdj{Rt;tiZViwPtPQpexD6%_J`O+*Mh;jGWDaZ&cn*vXjt=w=0uLY$Fb_TtiVvI*pbyLsBoJ5-iV(^W>=5)277-",
        "W`8W9{3AQ2)FC=oCbG7&TpIuT3}P7!1gW)Wx+Y7uM^a1nwLj1iI%xDm<`?h)`201^fg3K9$w5)u>=77`>9HWEe>S`v5?rV_dm;1c{20uvGwC=)",
        "UhG!se_QWLTh)Dzkh;uGu>@DuVA_!9~g7!)WJKonFIa1^=}&J^Ml<`e)G1{DkyOcin!bQPc#`V}G;NEU<^q!!2)$`;NR&=%Sj;ua7WJ{Lq6W*2",
        "G~Y!`4BgcqO}vKQ7D{uhoIq8PRqz!<_9#u)Y({1^fmI2k$_Xc=l5kQtyE",
    ),
    "IQ2_S": (
        "000621ONsA2mlHI3;+%Q5C9SY6aW?g7yujq9snQ!A^;=+CIBb^DgZ73FaR<DGypaLH~=~TJODrdLI6krOaM>-",
        "QUFu{RsdK4S^!)CUI1VKWB_IWYyfTmZ~$@ub^v$)dH{R?egJ|1gaC*DiU5!Rk^qzdngE;tq5z}-",
        "rU0k_tN^Y6v;e#Sz5u`g!T`ho#sJCy*Z|xB-~i+R>;Uut_5k<*`T+a@{r~_00s#gA2muNK3;_-",
        "S5CIYa6af|i7y%jq9048yAORu)BmpV`ECDV7Faa_FHUT&RJOMrdL;*$tNC8R#OaV>-Pytc_Q~_22S^-",
        "=EU;$zQWC3OYXaQ;gYyoZoashM!dI5X^egS|1gaL*Di~*Jbm;ssroB^Hzq5-",
        "f0v;npOx&gca!U4<y&H>Z`<^kvd>H+Kl@B#7x^a1t(_yPO@00II61Of&E2m%TM3<3@U5CRke76KdsAOa`?HUc;TIs!lfLIOkrMgmF#QUX>2SOQ",
        "!EUIJtSZUS}!hys!VlmeUrpaP--tOCvg+5+4H-",
        "U8qP;sWFX<^t#f>;mor@B;J#_5%0<`U3s}00RO81Oo;G2m=ZO3<D4Y5(5+i7y}#w9s?o+Bm*h~ECVhBFat6JGy^sRI0HHZJOe%hKm$SpMgvF#N",
        "&`#-P6JQ_QUg>2SOZ!EU;|<UWCLacY6ENod;@+1f&+vDhy#uTkOP(jnggH%q64x6v;(>W%mdB?&;!x~)&tlB+5_AJ-",
        "UH$T<OApf>I3Wp?gQ`x@&oh(_5=C@`~w061Ox^I2m}lS4g?eg9t0o+A_OD^CIl!1Dg-P9Fa$CLI0QNbJOn-jLIgwvN(58{Rs>uGZUk}!bOd+=d",
        "IW$3iUf=Vk_4m#z68Jo!UV(w#stU&%mmH^(gfNB+yveP-~{9Z<^=2n_5}C@5Cswi6a^Lq8U-",
        "8$A_Xi3E(J6NL<L#}WCdykd<BXHvIVpSwgtEayam1mzy-nu#0AI&%mvN`&;`~7*ag}J;sxjh@CEb*0tN&I1_lfU4h9eg76u*$AO<1^C<ZD9Fa|",
        "mXJO)ArR0doIXa;NsZU%A&cm|LLk_Ms%rUs}6ss^kEt_HFOv<A2ax(2`o!Un_!#s<m;%m&g1+y>qT<OcQz`Ud<400#mG2nP}e6bBjyC<iPDNC!",
        "#>PzPcMatD|PoCl%@qzAMIwg<ci)(7YZ>Idux@&_ykLI_R>Y6x}+cnFLLjtGzlk_eOtmI#;#nh2Z-",
        "o(P}_q6nr4s0gYEtO%|Mun4jUv<S8cxCpukya>Vw#0bg=&Ir&5)CkrH+z8$X;0WRf<_PEr>Im!z?g;P*@(B0{`Uw08{s;gG0to~O1_=rY3<(km",
        "6bTjy7zrE+9tk7~E(tIRHVHThIte@pLJ3F-",
        "ObJd2QVCQES_xzcW(j@?fC+*Lgb9WThzW`bj0uhjkO`6rlnIsznhBf<o(Z4{q6wr4rU|GCtO>3Ov<bEexCy!mz6rny#tF~~(h1ZF)(O}N+6mkV",
        "-U;Ff<O%8t><R7(@Coz@_6ht61PTTU2nr4gAPOQ1Bnl=9DhezLG73BjJ_<w%Rtjtiatd?`cnW$7d<uRFfC_{Ph6;=djtY<pk_wgzm<pZ>stT|Q",
        "!V1I+#tO&^%nHs5)C%4T;0opn_zDIK6blv$91AWBWD8~sXbWl!ZVPY=atm||b_;k5dJB9DfD3{PgbRiXhzp7fj0=tnk_(gznhTr@o(rH0qzk4C",
        "whOomx(mDuz6-z$!VAO;$P3B~&<oNF)C<-N+6&wZ;tT8x?hEt_1`G-",
        "e3=9wq5)2p&A`B!9DhxUdJPcS2S`1taUJPIiVhm&qW(;Z!Yz%S?bPRS3cno|Dehh>Rjtr0tmJFy2stl|Qt_-pav<$io#0<s^%naTP`V9OG0u2x",
        "i6b(uZObt#APz_WKRt;PYW({Z!ZVh$~fDN1to(-f8whinJ{0$}!Iu1S#Kn_9<Mh-|0N)Aj8P!3WKSPoncUJhaoWDaT$b`E?Fjt-Cxk`9y(m=2l",
        "_pbn}ItPZjc#17OB;tuEz`VI&WC=W0XG!HfpIuAS#LJv$2P7hQMW)Ff7gb#`joDZZAv=71$(hn36BoHPLED%%>Xb^M|ju7Gy4iOd+7!eu~91$Q",
        "9A`vDLC=o0XG7&TpIuSe(J`q3>L=j98P!U!USP^IuY7uS`a1nA5bP;wDdJ%jPf)Rufh7pJnj1i6zo)MrCrV+LgxDmV&z!Aa`#1YgH))Cwh3K9$",
        "w4iXR&5)u>=77`c|91<iFCK4zTDiSUdFcLNrKoUX{ND^8SToPUqU=m~!W)f@?b`p3JeiD!pm=dfKt`f8o#1h65{1N~Y1``Mq7!w*3AQMItP7_c",
        "QXcK-DvJ=P?$`jTT=o9c0@)PzG_!IgQ{1g5Y1QZGs3=|F&5EK*?78D#5CKM<XE)+l%L=;LCOcY!cUKC^$Y!s3dloXm2tQ6i9;uPc*<`n1@>=f=",
        "4^c4OS02Kxm7!@WJG!-@#JQYqAcolpVgcYO}v=!DB*cILt>=p18Bo-zXNES>Mwid`1%oflV)E3+p;uho<<`(Q05*HX3G#5%2Y!`ADeiwolgcqV",
        "0rWdFexEH(^z8Az7)))8}1{e$&92kNawiw13_!uS`IvG|OSQ%m&WEp4~j2WOA",
    ),
    "IQ3_XXS": (
        "000621ON#D3jhxQ5C9SY82};xI{-",
        "ZZK>$MlNB~LzQ2<o{SO8i8VE}9ZcmRL^f&hd7i2#rQk^q?in*g5xsQ|A4y#T=g#{kFx$^g{>_y7w59|0r*F9ACNJpn-hM*&&^Y5|=Av;oKg%mK",
        "~;;{ovj0RjU82m%TM5dsqe7y=ps90Df-C;~tNLIOzwPy$i{fdYd9hyscNkph?kx&pug!UE6&*#hPQ_5uL|1p_DpPy<v0W&?Qxg#*$9-",
        "~#{z0t5*J3j`1Z5(E|m83ZB(K?FktMFdC$N(4~^SOjwfcLaC@fCPdBi3E=XkOYzhp9G);tpvdY$OOy;_yqg}9R(`|Lj_j_VFi2z!3Dzw&IRQK0",
        "R{*L3I-7d69y;-",
        "H3m8cKn6kvPzG5BWCmsifd+#Hhz6Agss_3S$p+g77zZZ@ItM@pMh8*{Z3m18o(HoB+XwIm1PBiZ9S9!?D+n(Ld<c*Tp9r7`un4vY#|Y&J1PLh#",
        "GznD+V+nW(#R<p>$_dyB3JM_#I0`@tMhaF6Z3>JEnhLrK!V2pO2n!Pn7YjNILJL_7s0-8!;tLcEBn&1DGz?J;aSV?Pv<%n`-",
        "V7uSMGa~Vn+?Ma(G3F*1r7%e2o4$!Dh^f-U=E57r4FhNzz)q0+Yay!5f32`Ko3F>R1cUB",
    ),
    "IQ3_S": (
        "000310ssX72LK2F2>=QJ3;+%Q5C9PX6#yFmAOIo&B>*P?DF7<~FaR<DIRHEWKL9`gK>$JkL;y$tNdQd%PykZ^R{&W6T>xYNaR7AydH{d`fdGX7",
        "hX9BGivW%QkpPtdm;jsrq5!1;rvRw{s{ptFy8y!g$pFm&&;Zf^*#O%B-T>qP=m6>f_W=0-",
        "{Qv*~3jq%S5djnd8UY{yBLOJ^H~~TdL;+9%QUO*0TLEDKWdUaab^&_<h5?BIivgJdssXtHzyZPm!~xI&(gD^1+X3hS>;V7*0RjR71Of;G2?7fO",
        "4FV4W5CRec83G&v9s(=^E&?$EIs!lfK>|YpMgm9zOaf5?SOQxDVFG9ZY65ryegc33iUN%Sj{=YalmeOppaP=;tpczDx&pxh!~(|x$O6j((E`^3",
        "*aF-F;R5mk_yPk11p^8L3<DVh8v`N(CIct~ECWFUNCQg)Q3F^5S_5eVkOPzhmjk2&rUStP!vn|z$^+2@-2>qR@&ot-",
        "00aR90|W&G2LuQN3Iq%U4g?Vd69g9o7z7#wAp|1?B?Kr0Dg-wKI0QQcJp@1mLIg+zO9W2@QUp~5Sp-}JVgzXffdqsEhXj!XlLVLqp9G-",
        "<s|2qExdglfzy!hs#RSO&(gf55*#z4J;sodf_5=Y12L%uX69pOt9R(o;It4uiL<LC&QUzZHU<GRhcm;q3f(3^Kkp-",
        ";<u?58i$pzL0*ahPS=mi1>2?h%W4F(Se5(XIt8wMQ)A_gP|Ck817GX^;ZK?XwxMFva;Q3g{6U<PmodIo+5fCh>NkOrCtoCc@{!3M|%%m&d0(+1",
        "ZD*aqPS;|Avj?FRb>0|yBQ4hIqk83!r{Fb6aTK?g_&N(WU3S_fnYZU=h@jt8L!!3V<!&<D~7-3I^&1PBTU5C{|q7YG^%AqXf4I0!-",
        "rM+iv>O9)a3SO{GRV+d&oZ3uw~g9wNSjR=tln+Tu?uL!aTxCq1u$q35`&<N59*$CYT00{yK6bT;*APG4MMF~d<Q3-",
        "MhiwT?wunEWs%?a2E;|b{r0tyHU3<?qoAPOW3CkiSGHVQlnK?*|(MG8s^Q3_fLdJ2FFi3*bnm<pZ>s|vyj#|p>_*9znc=?e7<`w9UI1Pc%g8Ve",
        ">1N()vCX$xx$q6@+c#0%032@DGi4Gb9!8w@ZEKnzd}R}6FviVU0#q71DJvJAKkzzoa`(G1`W6%8W|G7UftLk(OFa1DhGpbg0l%MAby1P%ud5Dp",
        "R!9u6Q5EDkabLJmm|R1RYfWe$N3gbs)fjt-Fym=389!VcOF-45#x0S^Ta3l9(vC=XH(Vh@53nGe7Z",
    ),
}  # fmt: skip
